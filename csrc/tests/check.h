// The smallest test support: checks that keep going, a report, and an exit status.
#pragma once

#include <cstdio>
#include <sstream>
#include <string>

namespace proa::test {

inline int failures = 0;

inline void report(bool ok, const char* file, int line, const std::string& text) {
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, text.c_str());
}

template <class A, class B>
void report_equal(const A& a, const B& b, const char* file, int line, const char* text) {
  if (a == b) return;
  std::ostringstream values;
  values << text << " (" << a << " and " << b << ")";
  report(false, file, line, values.str());
}

// The exit status of main.
inline int result() {
  if (failures > 0) std::fprintf(stderr, "%d checks failed\n", failures);
  return failures > 0 ? 1 : 0;
}

}  // namespace proa::test

#define CHECK(condition) ::proa::test::report(static_cast<bool>(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) ::proa::test::report_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
