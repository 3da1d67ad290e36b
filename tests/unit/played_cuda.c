/* CUDA's driver as vmm.c uses it, played: a device's memory is the host's, of files without names, at addresses that
   can't be touched while they have none. There is so much of it, a call fails when that is wanted, and what the real
   driver doesn't allow is counted. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FINE, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 101, ON_PURPOSE = 999 };
enum { MOST = 4096, VMM_SUPPORTED = 102 };

typedef struct { int type, handles, location, id; void *metadata; unsigned char flags[8]; } Properties;
typedef struct { int location, id, flags; } Access;

static struct { int file; size_t size; int held, mapped, used; } memory[MOST]; /* by handle, from 1 */
static struct { uint64_t address; size_t size; uint64_t handle; } mapping[MOST];
static struct { uint64_t address; size_t size; } range[MOST];
static size_t limit, granularity, in_use;
static long calls, fails_at;
static int misuses, supported, synchronized;
static __thread void *current;

void played_begin(size_t bytes, size_t least) {
    limit = bytes, granularity = least;
    calls = fails_at = misuses = 0, supported = 1;
}
void played_limit(size_t bytes) { limit = bytes; }
void played_fail_at(long call) { calls = 0, fails_at = call; } /* counted from 1; 0 for never */
int played_misuses(void) { return misuses; }
int played_synchronized(void) { return synchronized; }
size_t played_in_use(void) { return in_use; }
size_t played_mappings(void) {
    size_t found = 0;
    for (int i = 0; i < MOST; i++) found += mapping[i].size != 0;
    return found;
}
size_t played_ranges(void) {
    size_t found = 0;
    for (int i = 0; i < MOST; i++) found += range[i].size != 0;
    return found;
}

void played_end(void) { /* the process's end: all of it goes */
    for (int i = 0; i < MOST; i++) {
        if (range[i].size) munmap((void *)(uintptr_t)range[i].address, range[i].size);
        if (memory[i].used) close(memory[i].file);
    }
    memset(range, 0, sizeof range), memset(memory, 0, sizeof memory), memset(mapping, 0, sizeof mapping);
    in_use = 0;
}

static int fails(void) { return ++calls == fails_at; }
static int misuse(void) { return misuses++, INVALID; }
static void end(uint64_t handle) { /* memory lives while it has a handle or a mapping */
    if (memory[handle].held || memory[handle].mapped) return;
    close(memory[handle].file);
    in_use -= memory[handle].size;
    memory[handle].used = 0;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == NO_MEMORY ? "out of memory" : code == ON_PURPOSE ? "on purpose" : NULL;
    return *text ? FINE : INVALID;
}
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < 2 ? FINE : NO_DEVICE; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == VMM_SUPPORTED ? supported : 0;
    return FINE;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    static char contexts[2];
    *context = &contexts[device];
    return FINE;
}
int cuCtxGetCurrent(void **context) { return *context = current, FINE; }
int cuCtxSetCurrent(void *context) { return current = context, FINE; }
int cuCtxSynchronize(void) { return fails() ? ON_PURPOSE : (synchronized++, FINE); }
int cuMemGetAllocationGranularity(size_t *least, const Properties *wanted, int option) {
    (void)wanted, (void)option;
    return fails() ? ON_PURPOSE : (*least = granularity, FINE);
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t where, unsigned long long flags) {
    (void)alignment, (void)where, (void)flags;
    if (fails()) return NO_MEMORY;
    if (!current || size % granularity) return misuse();
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return NO_MEMORY;
    for (int i = 0; i < MOST; i++)
        if (!range[i].size) {
            range[i].address = *address = (uint64_t)(uintptr_t)found, range[i].size = size;
            return FINE;
        }
    return misuse();
}
int cuMemAddressFree(uint64_t address, size_t size) {
    if (fails()) return ON_PURPOSE;
    for (int i = 0; i < MOST; i++)
        if (mapping[i].size && mapping[i].address >= address && mapping[i].address < address + size) return misuse();
    for (int i = 0; i < MOST; i++)
        if (range[i].size == size && range[i].address == address) {
            range[i].size = 0;
            return munmap((void *)(uintptr_t)address, size) ? misuse() : FINE;
        }
    return misuse();
}
int cuMemCreate(uint64_t *handle, size_t size, const Properties *wanted, unsigned long long flags) {
    if (fails()) return NO_MEMORY;
    if (!current || size % granularity || wanted->type != 1 || wanted->location != 1 || flags) return misuse();
    if (in_use + size > limit) return NO_MEMORY;
    for (uint64_t i = 1; i < MOST; i++)
        if (!memory[i].used) {
            memory[i].file = memfd_create("played", MFD_CLOEXEC);
            memory[i].size = size, memory[i].held = memory[i].used = 1, memory[i].mapped = 0;
            if (memory[i].file < 0 || ftruncate(memory[i].file, size)) return NO_MEMORY;
            void *at = mmap(NULL, size, PROT_WRITE, MAP_SHARED, memory[i].file, 0);
            if (at == MAP_FAILED) return NO_MEMORY;
            memset(at, 0xAB, size); /* nothing is there by accident */
            munmap(at, size);
            in_use += size;
            *handle = i;
            return FINE;
        }
    return misuse();
}
int cuMemRelease(uint64_t handle) {
    if (fails()) return ON_PURPOSE;
    if (!handle || handle >= MOST || !memory[handle].used || !memory[handle].held) return misuse();
    memory[handle].held = 0;
    end(handle);
    return FINE;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    if (fails()) return ON_PURPOSE;
    if (!handle || handle >= MOST || !memory[handle].held || size != memory[handle].size || offset || flags)
        return misuse();
    int inside = 0;
    for (int i = 0; i < MOST; i++) {
        inside |= range[i].size && address >= range[i].address && address + size <= range[i].address + range[i].size;
        if (mapping[i].size && address < mapping[i].address + mapping[i].size && mapping[i].address < address + size)
            return misuse();
    }
    if (!inside) return misuse();
    for (int i = 0; i < MOST; i++)
        if (!mapping[i].size) {
            if (mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory[handle].file, 0)
                == MAP_FAILED) return NO_MEMORY;
            mapping[i].address = address, mapping[i].size = size, mapping[i].handle = handle;
            memory[handle].mapped++;
            return FINE;
        }
    return misuse();
}
int cuMemUnmap(uint64_t address, size_t size) {
    if (fails()) return ON_PURPOSE;
    for (int i = 0; i < MOST; i++)
        if (mapping[i].size == size && mapping[i].address == address) {
            mapping[i].size = 0;
            mmap((void *)(uintptr_t)address, size, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
            memory[mapping[i].handle].mapped--;
            end(mapping[i].handle);
            return FINE;
        }
    return misuse();
}
int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    if (fails()) return ON_PURPOSE;
    for (int i = 0; i < MOST; i++)
        if (mapping[i].size == size && mapping[i].address == address && count == 1 && access->flags == 3)
            return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) ? misuse() : FINE;
    return misuse();
}
