// AVX-512 on AVX2, for tests only. The kernel sources in isa/*.inl compile and run with it on a CPU
// without AVX-512, so that every machine tests the same lines.
//
// Use: include this file INSTEAD of <immintrin.h>, with -DKT_EMULATE -mavx2 -mfma -mf16c -mbmi2
// -ffp-contract=off and no -mavx512* flag. It needs SIMDe 0.7.4 or later on the include path
// (Debian: libsimde-dev). SIMDe supplies most of the instruction set. This file adds what SIMDe
// lacks, or implements inexactly (dpbf16_ps, scalef_ps), wrongly (madd_epi16) or slowly
// (dpbusd_epi32). An intrinsic that neither has fails to compile ("target specific option
// mismatch"); add it here, with a case in tests/kernels/cpp/emul/.
//
// Everything is static, so no symbol of this file can replace one of a real kernel object.
// Immediates may be run-time values here, so that -O0 works. Rounding follows MXCSR, as in the
// instructions, except where noted:
//
//   dpbf16_ps    Per 32-bit lane: t = fma(a.odd, b.odd, acc); acc = fma(a.even, b.even, t): two
//                roundings, the odd pair first. MXCSR is ignored: nearest-even, denormal inputs
//                (including acc) are read as zero, denormal results are flushed to zero, and there
//                are no exceptions. The masked forms are refused: GCC 12.2 keeps only 8 of their 16
//                mask bits (it emits kmovb), so kernels must mask the operands instead.
//   cvtne*_pbh   Nearest-even; denormal inputs give a zero of the same sign; NaN keeps its upper
//                half and becomes quiet.
//   reduce_*     The order of GCC's and Clang's sequence: halves, quarters, pairs.
//   stream_*     Ordinary loads and stores, which still require alignment.
//
// Masked loads and stores access only the enabled elements, like the instructions, so buffers may
// end at the edge of a page.
#pragma once
#ifndef KT_EMULATE
#error "emul512.h is for the emulated test build: compile with -DKT_EMULATE"
#endif
#ifdef __AVX512F__
#error "emul512.h must not be compiled with AVX-512 flags: SIMDe would use the real instructions"
#endif
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "emul512.h needs -mavx2 -mfma -mf16c"
#endif

#include "arithmetic512.h"
#include "bf16_512.h"
#include "compare512.h"
#include "convert512.h"
#include "dot512.h"
#include "memory512.h"
#include "reduce512.h"
#include "shuffle512.h"
