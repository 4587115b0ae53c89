// The text of the last failure, per thread.
#include <stdarg.h>
#include <stdio.h>

#include "kernels/kernels.h"

namespace {
thread_local char last_error[512];
}

int plait::fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return -1;
}

const char *plait_last_error(void) { return last_error; }
