// What this CPU can do, by the names that Linux gives its features.
#pragma once

namespace plait {
// Whether the CPU has the feature and the operating system saves the registers it needs; false for unknown names.
bool cpu_has(const char *feature);
}  // namespace plait
