// The grouped formats: a new one is its header and one name here (and its name in weight_format.h).
#pragma once

#include "format/int4.h"
#include "format/int8_g32_f16.h"
#include "format/iq4_nl.h"
#include "format/mxfp4.h"
#include "format/nvfp4.h"
#include "format/q2_k.h"
#include "format/q3_k.h"
#include "format/q4_1.h"
#include "format/q4_k.h"
#include "format/q5_0.h"
#include "format/q5_1.h"
#include "format/q5_k.h"
#include "format/q6_k.h"

namespace proa::format {

template <class... F>
struct FormatList {};

using GroupedFormats = FormatList<Int4G32, Int4G64, Int4G128, Int4G32F16, Int4G64F16, Int4G128F16, Int8G32F16,
                                  MxFp4, NvFp4, Q4_1, Q5_0, Q5_1, Iq4Nl, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K>;

}  // namespace proa::format
