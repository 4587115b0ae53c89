#include "plait_native.h"

int32_t plait_abi_version(void) { return PLAIT_ABI_VERSION; }
