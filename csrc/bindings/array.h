// Checked, zero-copy views of the array arguments of a binding.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace proa::bindings {

// How elements cross the boundary: bf16 arrives as torch bfloat16 or as its bits in uint16, fp16 as its bits
// in uint16, fp8 as uint8. An array of uint16 passes for kBf16.
enum class DType : uint8_t { kF32, kBf16, kU16, kI32, kI64, kU8, kI8, kOther };
enum class Access : uint8_t { kRead, kWrite };
// kRows: the last dimension is contiguous, the outer ones have any stride.
enum class Layout : uint8_t { kContiguous, kRows };

inline constexpr int64_t kAnySize = -1;

// Views a numpy array (any object with the buffer protocol) or a torch CPU tensor (through DLPack's C
// exchange table, torch >= 2.10). The caller must keep the object alive, as the arguments of a call are.
// Create and destroy with the GIL held; the data may be used without it.
class Array {
 public:
  static constexpr int kMaxRank = 4;

  // Throws nanobind::type_error for what is no array, std::invalid_argument for one that cannot be viewed.
  Array(const char* function, const char* name, nanobind::handle source, Access access);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  // Throws nanobind::type_error on another dtype and std::invalid_argument on another rank, size or layout,
  // and on a writable array whose elements overlap. kAnySize in `shape` takes any size.
  const Array& expect(DType dtype, std::initializer_list<int64_t> shape,
                      Layout layout = Layout::kContiguous) const;

  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;       // ValueError
  [[noreturn]] void fail_type(const std::string& expected, const std::string& got) const;  // TypeError

  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  int64_t size(int dim) const { return shape_[dim]; }
  int64_t stride(int dim) const { return stride_[dim]; }  // in elements
  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }
  std::string describe() const;  // "float32 [4, 576]"

 private:
  bool import_tensor(nanobind::handle source);
  bool import_buffer(nanobind::handle source);
  void set_buffer_dtype();
  bool overlaps() const;

  const char* function_;
  const char* name_;
  Access access_;
  DType dtype_ = DType::kOther;
  int rank_ = 0;
  void* data_ = nullptr;
  int64_t shape_[kMaxRank] = {};
  int64_t stride_[kMaxRank] = {};
  std::string other_dtype_;
  Py_buffer buffer_{};
};

}  // namespace proa::bindings
