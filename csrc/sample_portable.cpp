#define PLAIT_SAMPLE_LOOPS sample_loops_portable
#include "sample_loops.inl"
