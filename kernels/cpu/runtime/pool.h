// Threads that wait for work. Kernels split their work into tasks whose results don't depend on who does them.
#pragma once
#include <stdint.h>

namespace llmx_pool {

using Task = void (*)(void* context, int64_t task, int thread);

// Calls run(context, t, thread) for t in [0, tasks), each once, on this thread and up to `threads` - 1 others.
// `thread` is below `threads`. Returns when all are done.
void each(Task run, void* context, int64_t tasks, int threads);

// What will be read first by a job that is yet to come: threads that wait ask for it meanwhile, so that the memory is not
// idle between two jobs. Each asks for the beginning of its range; or, with no job for a while (`away`), the others for
// all of it, as the caller is busy elsewhere. Nothing happens at nullptr.
void ahead(const void* at, int64_t bytes, bool away);

// Scratch memory of a thread, `bytes` at least, aligned to a cache line; its contents last until the next call.
void* scratch(int thread, int64_t bytes);

}  // namespace llmx_pool
