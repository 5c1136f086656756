#include "pack.h"

namespace kt {

bool is_of_a_row(PackError error) {
  switch (error) {
    case PackError::kBadGlobal:
    case PackError::kNeedsDense:
    case PackError::kNeedsBlocks:
    case PackError::kNeedsQuantised:
    case PackError::kNeedsFp16Scales:
    case PackError::kNeedsZeros: return false;
    default: return true;
  }
}

const char* describe(PackError error) {
  switch (error) {
    case PackError::kNone: return "";
    case PackError::kNotFinite:
      return "a weight is NaN or infinite; integer formats need finite weights";
    case PackError::kScaleOverflow:
      return "a group's scale is above the fp16 range (65504); use a format with float32 scales";
    case PackError::kNanCode:
      return "a weight is NaN (e4m3 code 0x7f or 0xff); accepted: all other codes";
    case PackError::kBadScale:
      return "a scale is NaN, infinite or negative; accepted: a finite number from 0";
    case PackError::kBadSignedScale: return "a scale is NaN or infinite; accepted: a finite number";
    case PackError::kBadBlockScale:
      return "a block's fp16 scale or minimum is NaN or infinite; accepted: a finite number";
    case PackError::kBadSubScale:
      return "a sub-block's scale or minimum has more than 6 bits, which no packed weight has";
    case PackError::kBadUe8m0Scale: return "a ue8m0 scale is 255 (NaN); accepted: 0 to 254";
    case PackError::kBadE4m3Scale:
      return "an e4m3 scale is NaN or has its sign set; accepted: codes 0x00 to 0x7e";
    case PackError::kBadZero: return "a zero point is above 16; accepted: 0 to 16";
    case PackError::kBadGlobal:
      return "the global scale is NaN, infinite or negative; accepted: a finite number from 0";
    case PackError::kNeedsBlocks:
      return "the weights are not ggml blocks; this weight format accepts only ggml's quantised "
             "blocks";
    case PackError::kNeedsDense:
      return "the weights have scales; this weight format accepts only dense bf16, fp16 or float32 "
             "weights";
    case PackError::kNeedsQuantised:
      return "the weights have no scales; this weight format accepts only quantised weights";
    case PackError::kNeedsFp16Scales:
      return "dense weights are quantised with fp16 group scales; other scale types are accepted "
             "only for quantised weights";
    case PackError::kNeedsZeros:
      return "zero points are missing; this weight format needs one per row and group";
  }
  return "";
}

}  // namespace kt
