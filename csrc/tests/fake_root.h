// A directory that stands for "/" in tests of what reads /proc and /sys.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace proa::test {

// Removed at the end.
class FakeRoot {
 public:
  FakeRoot() {
    // A tree has thousands of files, which take seconds on a disk.
    const std::filesystem::path shm = "/dev/shm";
    const bool in_memory = access(shm.c_str(), W_OK | X_OK) == 0;
    std::string name =
        ((in_memory ? shm : std::filesystem::temp_directory_path()) / "proa-topology-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  void write(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = path_ + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace proa::test
