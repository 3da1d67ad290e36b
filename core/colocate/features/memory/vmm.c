/* Memory of NVIDIA GPUs that can be freed at fixed addresses, and mapped there again.

   A segment is a range of addresses in chunks, each of which has memory of its own or none. Torch's caching allocator
   asks for segments and frees them (colocate_vmm_alloc, colocate_vmm_free) under its lock, so no Python runs here.

   The driver's functions are declared below and looked up in libcuda at load time: neither CUDA's headers nor a linked
   library are needed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define SMALL_SEGMENT ((size_t)20 << 20) /* up to this size chunks are minimal: torch packs small tensors there */
#define CHUNK ((size_t)128 << 20)        /* of larger segments, mostly of one tensor; many chunks are slow */
#define MOST_DEVICES 64

enum { DEVICE = 1, PINNED = 1, READ_WRITE = 3, MINIMUM = 0, VMM_SUPPORTED = 102, RDMA_SUPPORTED = 110 };
enum { INVALID_DEVICE = 101, NO_SUCH_ADDRESS = -1 };

typedef struct { int type, id; } Location;
typedef struct {
    int type, handles;
    Location location;
    void *metadata;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Properties;
typedef struct { Location location; int flags; } Access;

static struct {
    int (*cuGetErrorString)(int, const char **);
    int (*cuDeviceGet)(int *, int);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxSetCurrent)(void *);
    int (*cuCtxSynchronize)(void);
    int (*cuMemGetAllocationGranularity)(size_t *, const Properties *, int);
    int (*cuMemAddressReserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    int (*cuMemAddressFree)(uint64_t, size_t);
    int (*cuMemCreate)(uint64_t *, size_t, const Properties *, unsigned long long);
    int (*cuMemRelease)(uint64_t);
    int (*cuMemMap)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
    int (*cuMemUnmap)(uint64_t, size_t);
    int (*cuMemSetAccess)(uint64_t, size_t, const Access *, size_t);
} driver;

typedef struct {
    uint64_t memory; /* the driver's handle */
    uint64_t used;   /* the bytes of tensors in the chunk when it was freed */
    char exists, mapped;
    char made, placed; /* by the present operation: undone if that fails */
} Chunk;

typedef struct {
    uint64_t address, serial; /* a later segment may have the same address */
    size_t size, chunk, chunks;
    int device;
    Chunk *each;
} Segment;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static Segment *segments;
static size_t count, room;
static uint64_t serials;
static struct { void *context; int device; } entered[MOST_DEVICES];

/* An error: the driver's code, and the function that returned it. */
typedef struct { int code; const char *call; } Failure;

#define CALL(failure, function, ...) \
    (((failure)->code = driver.function(__VA_ARGS__)) == 0 ? 1 : ((failure)->call = #function, 0))

/* Load the driver's functions. Returns the missing one, or NULL. */
const char *colocate_vmm_load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return dlerror();
#define FIND(function) \
    if (!(*(void **)&driver.function = dlsym(library, #function))) return #function " isn't in it"
    FIND(cuGetErrorString);
    FIND(cuDeviceGet);
    FIND(cuDeviceGetAttribute);
    FIND(cuDevicePrimaryCtxRetain);
    FIND(cuCtxGetCurrent);
    FIND(cuCtxSetCurrent);
    FIND(cuCtxSynchronize);
    FIND(cuMemGetAllocationGranularity);
    FIND(cuMemAddressReserve);
    FIND(cuMemAddressFree);
    FIND(cuMemCreate);
    FIND(cuMemRelease);
    FIND(cuMemMap);
    FIND(cuMemUnmap);
    FIND(cuMemSetAccess);
    return NULL;
}

const char *colocate_vmm_error(int code) {
    const char *text = NULL;
    return driver.cuGetErrorString(code, &text) || !text ? "an unknown error" : text;
}

/* Make the device's primary context current, as torch does; the previous context goes to `before`. */
static int enter(int ordinal, int *device, void **before, Failure *failure) {
    *before = NULL;
    if (ordinal < 0 || ordinal >= MOST_DEVICES) {
        failure->code = INVALID_DEVICE, failure->call = "cuDeviceGet";
        return 0;
    }
    if (!entered[ordinal].context) {
        void *context = NULL;
        if (!CALL(failure, cuDeviceGet, &entered[ordinal].device, ordinal)) return 0;
        if (!CALL(failure, cuDevicePrimaryCtxRetain, &context, entered[ordinal].device)) return 0;
        entered[ordinal].context = context;
    }
    *device = entered[ordinal].device;
    return CALL(failure, cuCtxGetCurrent, before) && CALL(failure, cuCtxSetCurrent, entered[ordinal].context);
}

static void leave(void *before) {
    if (before) driver.cuCtxSetCurrent(before); /* a thread without a context keeps this one, as with torch */
}

static Properties properties(int device) {
    Properties wanted;
    int rdma = 0;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = PINNED;
    wanted.location.type = DEVICE;
    wanted.location.id = device;
    if (driver.cuDeviceGetAttribute(&rdma, RDMA_SUPPORTED, device) == 0 && rdma) wanted.flags.rdma = 1; /* for NCCL */
    return wanted;
}

static uint64_t start(const Segment *segment, size_t i) { return segment->address + i * segment->chunk; }

static size_t length(const Segment *segment, size_t i) {
    size_t rest = segment->size - i * segment->chunk;
    return rest < segment->chunk ? rest : segment->chunk;
}

static int let_go(Segment *segment, size_t i, Failure *failure) {
    Chunk *chunk = &segment->each[i];
    if (chunk->mapped) {
        if (!CALL(failure, cuMemUnmap, start(segment, i), length(segment, i))) return 0;
        chunk->mapped = 0;
    }
    if (chunk->exists) {
        if (!CALL(failure, cuMemRelease, chunk->memory)) return 0;
        chunk->exists = 0;
    }
    return 1;
}

static int make(Segment *segment, size_t i, const Properties *wanted, Failure *failure) {
    Chunk *chunk = &segment->each[i];
    if (chunk->exists) return 1;
    if (!CALL(failure, cuMemCreate, &chunk->memory, length(segment, i), wanted, 0)) return 0;
    chunk->exists = chunk->made = 1;
    return 1;
}

static int place(Segment *segment, size_t i, const Properties *wanted, Failure *failure) {
    Chunk *chunk = &segment->each[i];
    Access access = {wanted->location, READ_WRITE};
    if (chunk->mapped) return 1;
    if (!CALL(failure, cuMemMap, start(segment, i), length(segment, i), 0, chunk->memory, 0)) return 0;
    chunk->mapped = chunk->placed = 1;
    return CALL(failure, cuMemSetAccess, start(segment, i), length(segment, i), &access, 1);
}

/* Undo the present operation on a chunk. If the driver fails to free memory, the chunk's record still says so. */
static void undo(Segment *segment, size_t i) {
    Chunk *chunk = &segment->each[i];
    Failure ignored;
    if (chunk->placed && CALL(&ignored, cuMemUnmap, start(segment, i), length(segment, i))) chunk->mapped = 0;
    if (chunk->made && !chunk->mapped && CALL(&ignored, cuMemRelease, chunk->memory)) chunk->exists = 0;
}

static void settle(Segment *segment, size_t i) { segment->each[i].made = segment->each[i].placed = 0; }

static int add(const Segment *segment) {
    if (count == room) {
        size_t more = room ? 2 * room : 64;
        Segment *larger = realloc(segments, more * sizeof *larger);
        if (!larger) return 0;
        segments = larger;
        room = more;
    }
    segments[count++] = *segment;
    return 1;
}

/* Set whether a device supports virtual memory management. Returns the driver's error, or 0. */
int colocate_vmm_supported(int ordinal, int *supported, const char **call) {
    Failure failure = {0, NULL};
    void *before;
    int device;
    pthread_mutex_lock(&lock);
    if (enter(ordinal, &device, &before, &failure))
        CALL(&failure, cuDeviceGetAttribute, supported, VMM_SUPPORTED, device);
    leave(before);
    pthread_mutex_unlock(&lock);
    *call = failure.call;
    return failure.code;
}

/* Called by torch's allocator. Returns NULL if there is no room. */
void *colocate_vmm_alloc(ssize_t size, int ordinal, void *stream) {
    Segment segment;
    Failure failure;
    Properties wanted;
    void *before, *found = NULL;
    size_t least = 0, i;
    int device, left = 0;
    (void)stream;
    memset(&segment, 0, sizeof segment);
    pthread_mutex_lock(&lock);
    if (size <= 0 || !enter(ordinal, &device, &before, &failure)) {
        pthread_mutex_unlock(&lock);
        return NULL;
    }
    wanted = properties(device);
    if (!CALL(&failure, cuMemGetAllocationGranularity, &least, &wanted, MINIMUM) || !least) goto end;
    segment.serial = ++serials;
    segment.device = ordinal;
    segment.size = ((size_t)size + least - 1) / least * least;
    segment.chunk = segment.size <= SMALL_SEGMENT ? least : (CHUNK + least - 1) / least * least;
    segment.chunks = (segment.size + segment.chunk - 1) / segment.chunk;
    segment.each = calloc(segment.chunks, sizeof *segment.each);
    if (!segment.each || !CALL(&failure, cuMemAddressReserve, &segment.address, segment.size, 0, 0, 0)) goto end;
    for (i = 0; i < segment.chunks; i++)
        if (!make(&segment, i, &wanted, &failure) || !place(&segment, i, &wanted, &failure)) break;
    if (i == segment.chunks) {
        for (i = 0; i < segment.chunks; i++) settle(&segment, i);
        if (add(&segment)) {
            found = (void *)(uintptr_t)segment.address;
            goto end;
        }
        for (i = 0; i < segment.chunks; i++) segment.each[i].made = segment.each[i].placed = 1;
    }
    for (i = 0; i < segment.chunks; i++) {
        undo(&segment, i);
        left |= segment.each[i].mapped;
    }
    if (!left) CALL(&failure, cuMemAddressFree, segment.address, segment.size); /* a mapped range stays reserved */
end:
    if (!found) free(segment.each);
    leave(before);
    pthread_mutex_unlock(&lock);
    return found;
}

/* Called by torch's allocator. Kernels may still use the memory: torch frees in the order of streams. */
void colocate_vmm_free(void *address, ssize_t size, int ordinal, void *stream) {
    Failure failure;
    void *before;
    size_t n, i;
    int device, fine;
    (void)size;
    (void)stream;
    pthread_mutex_lock(&lock);
    for (n = 0; n < count && segments[n].address != (uint64_t)(uintptr_t)address; n++) {}
    if (n < count) {
        fine = enter(ordinal, &device, &before, &failure) && CALL(&failure, cuCtxSynchronize);
        if (fine)
            for (i = 0; i < segments[n].chunks; i++) fine = let_go(&segments[n], i, &failure) && fine;
        /* If a chunk stays mapped, the addresses stay reserved: they must not be reused. */
        if (fine) CALL(&failure, cuMemAddressFree, segments[n].address, segments[n].size);
        free(segments[n].each);
        segments[n] = segments[--count];
        leave(before);
    }
    pthread_mutex_unlock(&lock);
}

/* Write address, size, chunk size and serial of a device's segments, at most `most`. Returns the full number. */
size_t colocate_vmm_segments(int ordinal, uint64_t *out, size_t most) {
    size_t n, found = 0;
    pthread_mutex_lock(&lock);
    for (n = 0; n < count; n++) {
        if (segments[n].device != ordinal) continue;
        if (found < most) {
            out[4 * found] = segments[n].address;
            out[4 * found + 1] = segments[n].size;
            out[4 * found + 2] = segments[n].chunk;
            out[4 * found + 3] = segments[n].serial;
        }
        found++;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static Segment *find(uint64_t address) {
    static size_t last; /* callers ask in order of addresses */
    size_t tried;
    for (tried = 0; tried < count; tried++, last++) {
        Segment *segment = &segments[last < count ? last : (last = 0)];
        if (address >= segment->address && address - segment->address < segment->size) return segment;
    }
    return NULL;
}

/* Return the bytes with memory in a range of one segment. */
uint64_t colocate_vmm_present(uint64_t address, uint64_t size) {
    uint64_t present = 0, from, to, end = address + size;
    size_t i;
    pthread_mutex_lock(&lock);
    Segment *segment = find(address);
    for (i = segment ? (address - segment->address) / segment->chunk : 0;
         segment && i < segment->chunks && start(segment, i) < end; i++) {
        if (!segment->each[i].exists) continue;
        from = start(segment, i) > address ? start(segment, i) : address;
        to = start(segment, i) + length(segment, i) < end ? start(segment, i) + length(segment, i) : end;
        present += to - from;
    }
    pthread_mutex_unlock(&lock);
    return present;
}

/* Count a device's bytes without memory, and the bytes of tensors among these. */
void colocate_vmm_absent(int ordinal, uint64_t *absent, uint64_t *used) {
    size_t n, i;
    *absent = *used = 0;
    pthread_mutex_lock(&lock);
    for (n = 0; n < count; n++)
        for (i = 0; segments[n].device == ordinal && i < segments[n].chunks; i++)
            if (!segments[n].each[i].exists) {
                *absent += length(&segments[n], i);
                *used += segments[n].each[i].used;
            }
    pthread_mutex_unlock(&lock);
}

/* Free the memory of chunks, given as address, serial of the segment, and bytes of tensors. Chunks of segments that no
   longer exist are skipped. If the driver fails to free a chunk, the others are freed all the same. Returns the first
   error, or 0. */
int colocate_vmm_take(int ordinal, const uint64_t *chunks, size_t number, const char **call) {
    Failure failure = {0, NULL}, first = {0, NULL};
    void *before;
    size_t n, i;
    int device;
    pthread_mutex_lock(&lock);
    if (enter(ordinal, &device, &before, &first) && CALL(&first, cuCtxSynchronize))
        for (n = 0; n < number; n++) {
            Segment *segment = find(chunks[3 * n]);
            if (!segment || segment->serial != chunks[3 * n + 1]) continue;
            i = (chunks[3 * n] - segment->address) / segment->chunk;
            segment->each[i].used = chunks[3 * n + 2];
            if (!let_go(segment, i, &failure) && !first.code) first = failure;
        }
    leave(before);
    pthread_mutex_unlock(&lock);
    *call = first.call;
    return first.code;
}

/* A step of colocate_vmm_give, applied to all chunks of all ranges before the next step. */
typedef int (*Step)(Segment *, size_t, const Properties *, Failure *);

static int each_of(const uint64_t *ranges, size_t number, Step step, const Properties *wanted, Failure *failure) {
    size_t n, i;
    for (n = 0; n < number; n++) {
        Segment *segment = find(ranges[2 * n]);
        if (!segment) {
            failure->code = NO_SUCH_ADDRESS, failure->call = "colocate_vmm_give";
            return 0;
        }
        for (i = (ranges[2 * n] - segment->address) / segment->chunk;
             i < segment->chunks && start(segment, i) < ranges[2 * n] + ranges[2 * n + 1]; i++)
            if (!step(segment, i, wanted, failure)) return 0;
    }
    return 1;
}

static int undone(Segment *segment, size_t i, const Properties *wanted, Failure *failure) {
    (void)wanted, (void)failure;
    undo(segment, i);
    settle(segment, i);
    return 1;
}

static int settled(Segment *segment, size_t i, const Properties *wanted, Failure *failure) {
    (void)wanted, (void)failure;
    settle(segment, i);
    return 1;
}

/* Give memory to all chunks of some ranges (address and size), or to none. Returns the error, or 0. */
int colocate_vmm_give(int ordinal, const uint64_t *ranges, size_t number, const char **call) {
    Failure failure = {0, NULL}, ignored;
    Properties wanted;
    void *before;
    int device, fine;
    pthread_mutex_lock(&lock);
    fine = enter(ordinal, &device, &before, &failure);
    if (fine) {
        wanted = properties(device);
        /* All memory first: without room nothing gets mapped. */
        fine = each_of(ranges, number, make, &wanted, &failure) && each_of(ranges, number, place, &wanted, &failure);
        each_of(ranges, number, fine ? settled : undone, &wanted, &ignored);
    }
    leave(before);
    pthread_mutex_unlock(&lock);
    *call = failure.call;
    return fine ? 0 : failure.code;
}
