// Ends the computing of a graph after the node that is wanted.
#include "cbatch.h"

#include <cstring>

bool cbatch_stop_callback(void * tensor, bool is_before, void * given) noexcept {
    const auto * stop = static_cast<const cbatch_stop *>(given);
    if (!is_before) {
        return false;
    }
    const char * name = stop->get_name(tensor);
    return name != nullptr && std::strcmp(name, stop->name) == 0;
}
