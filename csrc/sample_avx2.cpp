#define PLAIT_SAMPLE_LOOPS sample_loops_avx2
#include "sample_loops.inl"
