// Forks counted, so that what belongs to the threads of a parent is not touched in its child.
#pragma once
#include <cstdint>

namespace kt::sys {

// Forks between the first process of the library and this one: whoever keeps the number of his own
// process sees by another one that his threads do not exist here, and that his mutexes may be held
// for ever.
uint32_t forks();

}  // namespace kt::sys
