#include "bindings/array.h"

#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace nb = nanobind;

namespace proa::bindings {
namespace {

// The parts of DLPack 1.x this file needs (dmlc/dlpack, dlpack.h): field order and sizes are its ABI.
struct DlDevice {
  int32_t type;
  int32_t id;
};
struct DlType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DlExchange {
  struct {
    uint32_t major, minor;
  } version;
  void* previous;
  void* managed_allocator;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DlTensor* out);
  void* current_stream;
};
constexpr int32_t kDlCpu = 1;
constexpr uint8_t kDlInt = 0, kDlUint = 1, kDlFloat = 2, kDlBfloat = 4;

// The exchange table of a type, or nullptr. The last type is remembered: all calls of a process use one
// tensor type. Guarded by the GIL; the type is kept alive by a reference.
const DlExchange* exchange_of(PyTypeObject* type) {
  static PyTypeObject* last_type = nullptr;
  static const DlExchange* last_table = nullptr;
  if (type == last_type) return last_table;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* table = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (table == nullptr) PyErr_Clear();
  if (table == nullptr || table->version.major != 1 || table->tensor_from_object == nullptr) return nullptr;
  Py_INCREF(type);
  Py_XDECREF(std::exchange(last_type, type));
  last_table = table;
  return table;
}

DType dtype_of(DlType type) {
  if (type.lanes != 1) return DType::kOther;
  if (type.code == kDlFloat && type.bits == 32) return DType::kF32;
  if (type.code == kDlBfloat) return DType::kBf16;
  if (type.code == kDlUint && type.bits == 16) return DType::kU16;
  if (type.code == kDlInt && type.bits == 32) return DType::kI32;
  if (type.code == kDlInt && type.bits == 64) return DType::kI64;
  if (type.code == kDlInt && type.bits == 8) return DType::kI8;
  // torch tells float8_e4m3fn apart by a code of its own; its bytes are read as uint8.
  if (type.bits == 8 && type.code != kDlInt) return DType::kU8;
  return DType::kOther;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBf16:
      return "bfloat16 (uint16)";
    case DType::kU16:
      return "uint16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kI8:
      return "int8";
    case DType::kOther:
      break;
  }
  return "another dtype";
}

size_t item_bytes(DType dtype) {
  if (dtype == DType::kU8 || dtype == DType::kI8) return 1;
  if (dtype == DType::kI64) return 8;
  return dtype == DType::kBf16 || dtype == DType::kU16 ? 2 : 4;
}

std::string text_of(const int64_t* sizes, int rank) {
  std::string text = "[";
  for (int i = 0; i < rank; ++i) {
    if (i > 0) text += ", ";
    text += sizes[i] == kAnySize ? "*" : std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace

Array::Array(const char* function, const char* name, nb::handle source, Access access)
    : function_(function), name_(name), access_(access) {
  if (!import_tensor(source) && !import_buffer(source))
    fail_type("a numpy array or a torch CPU tensor", nb::type_name(source.type()).c_str());
}

// The destructor runs on the way out of a binding, where the GIL is held again.
Array::~Array() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

bool Array::import_tensor(nb::handle source) {
  const DlExchange* exchange = exchange_of(Py_TYPE(source.ptr()));
  if (exchange == nullptr) return false;
  DlTensor tensor{};
  if (exchange->tensor_from_object(source.ptr(), &tensor) != 0) {
    PyErr_Clear();
    fail("a dense tensor on the CPU without gradient", "one that is not");
  }
  if (tensor.device.type != kDlCpu) fail("a tensor on the CPU", "one on another device");
  if (tensor.ndim > kMaxRank) fail("at most 4 dimensions", std::to_string(tensor.ndim));
  dtype_ = dtype_of(tensor.dtype);
  if (dtype_ == DType::kOther)
    other_dtype_ = "DLPack dtype (" + std::to_string(tensor.dtype.code) + ", " +
                   std::to_string(tensor.dtype.bits) + " bits)";
  rank_ = tensor.ndim;
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
  int64_t dense = 1;
  for (int i = rank_ - 1; i >= 0; --i) {
    shape_[i] = tensor.shape[i];
    stride_[i] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    dense *= shape_[i];
  }
  return true;
}

bool Array::import_buffer(nb::handle source) {
  if (!PyObject_CheckBuffer(source.ptr())) return false;
  const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (access_ == Access::kWrite ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(source.ptr(), &buffer_, flags) != 0) {
    PyErr_Clear();
    buffer_.obj = nullptr;
    fail(access_ == Access::kWrite ? "a writable array" : "a readable array", "one that is not");
  }
  // A throw below must release the buffer itself: the destructor does not run for a constructor that throws.
  struct Release {
    Py_buffer* buffer;
    ~Release() {
      if (buffer != nullptr) PyBuffer_Release(buffer);
    }
  } release{&buffer_};
  if (buffer_.ndim > kMaxRank) fail("at most 4 dimensions", std::to_string(buffer_.ndim));
  set_buffer_dtype();
  rank_ = buffer_.ndim;
  data_ = buffer_.buf;
  for (int i = 0; i < rank_; ++i) {
    shape_[i] = buffer_.shape[i];
    if (buffer_.strides[i] % buffer_.itemsize != 0) fail("strides of whole elements", "others");
    stride_[i] = buffer_.strides[i] / buffer_.itemsize;
  }
  release.buffer = nullptr;
  return true;
}

void Array::set_buffer_dtype() {
  std::string_view format = buffer_.format != nullptr ? buffer_.format : "B";
  if (format.size() == 2 && (format[0] == '<' || format[0] == '=' || format[0] == '@'))
    format.remove_prefix(1);
  if (format == "f" && buffer_.itemsize == 4)
    dtype_ = DType::kF32;
  else if (format == "H")
    dtype_ = DType::kU16;
  else if ((format == "i" || format == "l") && buffer_.itemsize == 4)
    dtype_ = DType::kI32;
  else if ((format == "q" || format == "l") && buffer_.itemsize == 8)
    dtype_ = DType::kI64;
  else if (format == "B")
    dtype_ = DType::kU8;
  else if (format == "b")
    dtype_ = DType::kI8;
  else
    other_dtype_ = "format '" + std::string(format) + "'";
}

const Array& Array::expect(DType dtype, std::initializer_list<int64_t> shape, Layout layout) const {
  const bool bits = dtype == DType::kBf16 && dtype_ == DType::kU16;
  if (dtype_ != dtype && !bits)
    fail_type(name_of(dtype), dtype_ == DType::kOther ? other_dtype_ : name_of(dtype_));
  bool same = rank_ == static_cast<int>(shape.size());
  for (int i = 0; same && i < rank_; ++i)
    same = shape.begin()[i] == kAnySize || shape.begin()[i] == shape_[i];
  if (!same) fail("shape " + text_of(shape.begin(), static_cast<int>(shape.size())), text_of(shape_, rank_));
  // The stride of a dimension of size 1 is never used.
  int64_t dense = 1;
  for (int i = rank_ - 1; i >= 0; --i) {
    const bool checked = layout == Layout::kContiguous || i == rank_ - 1;
    if (checked && shape_[i] > 1 && stride_[i] != dense)
      fail(layout == Layout::kContiguous ? "a C-contiguous array" : "a contiguous last dimension",
           "strides " + text_of(stride_, rank_));
    dense *= shape_[i];
  }
  if (reinterpret_cast<uintptr_t>(data_) % item_bytes(dtype_) != 0)
    fail("aligned elements", "a misaligned array");
  if (access_ == Access::kWrite && overlaps())
    fail("elements that do not overlap", "strides " + text_of(stride_, rank_));
  return *this;
}

// Whether two indices may name one element: sorted by stride, each dimension must step over all smaller ones.
bool Array::overlaps() const {
  std::pair<int64_t, int64_t> dims[kMaxRank];  // (stride, size), ascending
  int n = 0;
  for (int i = 0; i < rank_; ++i) {
    if (shape_[i] == 0) return false;
    if (shape_[i] == 1) continue;
    int at = n++;
    for (; at > 0 && dims[at - 1].first > std::abs(stride_[i]); --at) dims[at] = dims[at - 1];
    dims[at] = {std::abs(stride_[i]), shape_[i]};
  }
  int64_t extent = 1;
  for (int i = 0; i < n; ++i) {
    if (dims[i].first < extent) return true;
    extent = dims[i].first * (dims[i].second - 1) + extent;
  }
  return false;
}

std::string Array::describe() const {
  return (dtype_ == DType::kOther ? other_dtype_ : name_of(dtype_)) + (" " + text_of(shape_, rank_));
}

void Array::fail(const std::string& expected, const std::string& got) const {
  throw std::invalid_argument(std::string("[") + function_ + "] expected " + name_ + " with " + expected +
                              ", got " + got);
}

void Array::fail_type(const std::string& expected, const std::string& got) const {
  const std::string text =
      std::string("[") + function_ + "] expected " + name_ + " as " + expected + ", got " + got;
  throw nb::type_error(text.c_str());
}

}  // namespace proa::bindings
