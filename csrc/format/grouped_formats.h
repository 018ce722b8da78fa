// The grouped formats: a new one is its header and one name here (and its name in weight_format.h).
#pragma once

#include "format/int4.h"
#include "format/mxfp4.h"

namespace proa::format {

template <class... F>
struct FormatList {};

using GroupedFormats = FormatList<Int4G32, MxFp4>;

}  // namespace proa::format
