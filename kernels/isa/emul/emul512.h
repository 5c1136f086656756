// AVX-512 on AVX2, for tests only: lets the kernel sources in isa/*.inl compile and run on a CPU
// without AVX-512, so that every machine tests the same lines.
//
// Use: include this file INSTEAD of <immintrin.h>, with -DKT_EMULATE -mavx2 -mfma -mf16c -mbmi2
// -ffp-contract=off and no -mavx512* flag. Needs SIMDe 0.7.4 or later on the include path
// (Debian: libsimde-dev). SIMDe supplies most of the instruction set; here is what it lacks, or
// does inexactly (dpbf16_ps, scalef_ps) or wrongly (madd_epi16), or slowly (dpbusd_epi32). An
// intrinsic that neither has fails to compile ("target specific option mismatch"); add it here,
// with a case in tests/kernels/cpp/emul/.
//
// Everything is static: no symbol of this file can replace one of a real kernel object.
// Immediates may be run-time values here, so that -O0 works. Rounding follows MXCSR, as in the
// instructions, except where noted:
//
//   dpbf16_ps    Per 32-bit lane: t = fma(a.odd, b.odd, acc); acc = fma(a.even, b.even, t): two
//                roundings, the odd pair first. MXCSR is ignored: nearest-even, denormal inputs
//                (acc too) read as zero, denormal results flushed to zero, no exceptions.
//                The masked forms are refused: GCC 12.2 keeps only 8 of their 16 mask bits (it
//                emits kmovb), so kernels must mask the operands instead.
//   cvtne*_pbh   Nearest-even; denormal inputs give a zero of the same sign; NaN keeps its upper
//                half, made quiet.
//   reduce_*     The order of GCC's and Clang's real sequence: halves, quarters, pairs.
//   stream_*     Ordinary loads and stores; alignment is still required.
//
// Masked loads and stores touch only the enabled elements, as in the instructions, so buffers may
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
