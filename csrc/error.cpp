// The text of the last failure, per thread.
#include <stdarg.h>
#include <stdio.h>

#include <exception>
#include <new>

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

int plait::fail_with_exception() {
  try {
    throw;
  } catch (const std::bad_alloc &) {
    return fail("not enough memory");
  } catch (const std::exception &exception) {
    return fail("%s", exception.what());
  } catch (...) {
    return fail("an unknown exception");
  }
}

const char *plait_last_error(void) { return last_error; }
