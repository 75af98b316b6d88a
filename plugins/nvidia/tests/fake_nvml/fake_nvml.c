/* A stand-in for libnvidia-ml.so.1: it answers from the file that FAKE_NVML names, one "key value" per line.
 *
 * A value "!N" makes the call return the NVML error N; a key that is not there, NotSupported (3).
 * Keys: init, hang (seconds), driver, cuda, count, and for GPU I, or MIG device I.J:
 *   gpu.I.handle, .uuid, .name, .bus, .pci, .minor, .memory (total/used), .mode, .cc (major minor), .mig (current
 *   pending), .slots, .gi, .ci, .rows (4 numbers), .retired, .recovery, .persistence, .util, .temp, .power,
 *   .clock.KIND, .ecc.KIND.COUNTER, .procs (pid:bytes ...), .link.L (switch, or a bus id), .fabric (state clique); ancestor.I.J
 * Every call of nvmlInitWithFlags and nvmlShutdown is noted in the file that FAKE_NVML_LOG names.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
typedef struct { int gpu, mig; char key[32]; } Handle;
typedef struct { char legacy[16]; unsigned domain, bus, device, pci, sub; char busid[32]; } Pci;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } Process;
static Handle handles[512];
static int used;

static char *get(const char *format, ...) {
    static char lines[1 << 16], value[256];
    char key[128];
    size_t length;
    va_list args;
    va_start(args, format);
    vsnprintf(key, sizeof key, format, args);
    va_end(args);
    if (!lines[0]) {
        FILE *file = getenv("FAKE_NVML") ? fopen(getenv("FAKE_NVML"), "r") : NULL;
        if (!file) return NULL;
        lines[fread(lines, 1, sizeof lines - 1, file)] = 0;
        fclose(file);
    }
    length = strlen(key);
    for (char *line = lines; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, key, length) || line[length] != ' ') continue;
        snprintf(value, sizeof value, "%.*s", (int)strcspn(line + length + 1, "\n"), line + length + 1);
        return value;
    }
    return NULL;
}

static int check(const char *value) {
    return !value ? NOT_SUPPORTED : value[0] == '!' ? atoi(value + 1) : SUCCESS;
}
static int text(const char *value, char *to, unsigned size) {
    int code = check(value);
    if (!code) snprintf(to, size, "%s", value);
    return code;
}
static int number(const char *value, unsigned *to) {
    int code = check(value);
    if (!code) *to = strtoul(value, NULL, 0);
    return code;
}
static Handle *handle(int gpu, int mig) {
    for (int i = 0; i < used; i++)
        if (handles[i].gpu == gpu && handles[i].mig == mig) return &handles[i];
    Handle *made = &handles[used++];
    made->gpu = gpu;
    made->mig = mig;
    if (mig < 0) snprintf(made->key, sizeof made->key, "gpu.%d", gpu);
    else snprintf(made->key, sizeof made->key, "gpu.%d.%d", gpu, mig);
    return made;
}
static void note(const char *what) {
    FILE *file = getenv("FAKE_NVML_LOG") ? fopen(getenv("FAKE_NVML_LOG"), "a") : NULL;
    if (file) { fprintf(file, "%s %d\n", what, getpid()); fclose(file); }
}

#ifndef STUB
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    note("init");
    if (get("hang")) sleep(atoi(get("hang")));
    return get("init") ? check(get("init")) : SUCCESS;
}
#endif
int nvmlShutdown(void) { note("shutdown"); return SUCCESS; }
const char *nvmlErrorString(int code) { static char message[32]; snprintf(message, 32, "error %d", code); return message; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return text(get("driver"), to, size); }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { return number(get("cuda"), (unsigned *)to); }
int nvmlDeviceGetCount_v2(unsigned *to) { return number(get("count"), to); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **to) {
    char *fault = get("gpu.%u.handle", index);
    if (fault && check(fault)) return check(fault);
    *to = handle(index, -1);
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **to) {
    int count = atoi(get("count"));
    for (int gpu = 0; gpu < count; gpu++)
        for (int mig = -1; mig < 8; mig++) {
            char *own = get("%s.uuid", handle(gpu, mig)->key);
            if (!own || strcmp(own, uuid)) continue;
            if (mig < 0) return nvmlDeviceGetHandleByIndex_v2(gpu, to);
            *to = handle(gpu, mig);
            return SUCCESS;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(Handle *h, char *to, unsigned size) { return text(get("%s.uuid", h->key), to, size); }
int nvmlDeviceGetName(Handle *h, char *to, unsigned size) { return text(get("%s.name", h->key), to, size); }
int nvmlDeviceGetPciInfo_v3(Handle *h, Pci *to) {
    memset(to, 0, sizeof *to);
    number(get("%s.pci", h->key), &to->pci);
    return text(get("%s.bus", h->key), to->busid, sizeof to->busid);
}
int nvmlDeviceGetMinorNumber(Handle *h, unsigned *to) { return number(get("%s.minor", h->key), to); }
int nvmlDeviceGetComputeMode(Handle *h, unsigned *to) { return number(get("%s.mode", h->key), to); }
int nvmlDeviceGetPersistenceMode(Handle *h, unsigned *to) { return number(get("%s.persistence", h->key), to); }
int nvmlDeviceGetRetiredPagesPendingStatus(Handle *h, unsigned *to) { return number(get("%s.retired", h->key), to); }
int nvmlDeviceGetTemperature(Handle *h, unsigned sensor, unsigned *to) { (void)sensor; return number(get("%s.temp", h->key), to); }
int nvmlDeviceGetPowerUsage(Handle *h, unsigned *to) { return number(get("%s.power", h->key), to); }
int nvmlDeviceGetClockInfo(Handle *h, unsigned kind, unsigned *to) { return number(get("%s.clock.%u", h->key, kind), to); }
int nvmlDeviceGetTotalEccErrors(Handle *h, unsigned kind, unsigned counter, unsigned long long *to) {
    char *value = get("%s.ecc.%u.%u", h->key, kind, counter);
    if (!check(value)) *to = strtoull(value, NULL, 0);
    return check(value);
}
int nvmlDeviceGetMaxMigDeviceCount(Handle *h, unsigned *to) { return number(get("%s.slots", h->key), to); }
int nvmlDeviceGetGpuInstanceId(Handle *h, unsigned *to) { return number(get("%s.gi", h->key), to); }
int nvmlDeviceGetComputeInstanceId(Handle *h, unsigned *to) { return number(get("%s.ci", h->key), to); }
int nvmlDeviceGetUtilizationRates(Handle *h, unsigned to[2]) { return number(get("%s.util", h->key), to); }
int nvmlDeviceGetMemoryInfo(Handle *h, unsigned long long to[3]) { /* total, free, used: with what is reserved */
    char *value = get("%s.memory", h->key);
    if (check(value)) return check(value);
    sscanf(value, "%llu/%llu", &to[0], &to[2]);
    to[2] += 1 << 20;
    return SUCCESS;
}
#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(Handle *h, unsigned long long to[5]) { /* version, total, reserved, free, used */
    char *value = get("%s.memory", h->key);
    if (check(value)) return check(value);
    sscanf(value, "%llu/%llu", &to[1], &to[4]);
    return SUCCESS;
}
#endif
int nvmlDeviceGetCudaComputeCapability(Handle *h, int *major, int *minor) {
    char *value = get("%s.cc", h->key);
    if (!check(value)) sscanf(value, "%d %d", major, minor);
    return check(value);
}
int nvmlDeviceGetMigMode(Handle *h, unsigned *current, unsigned *pending) {
    char *value = get("%s.mig", h->key);
    if (!check(value)) sscanf(value, "%u %u", current, pending);
    return check(value);
}
int nvmlDeviceGetMigDeviceHandleByIndex(Handle *h, unsigned slot, Handle **to) {
    Handle *mig = handle(h->gpu, slot);
    char *fault = get("%s.handle", mig->key);
    if (fault) return check(fault);
    *to = mig;
    return get("%s.uuid", mig->key) ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle *h, Handle **to) { *to = handle(h->gpu, -1); return SUCCESS; }
int nvmlDeviceGetRemappedRows(Handle *h, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    char *value = get("%s.rows", h->key);
    if (!check(value)) sscanf(value, "%u %u %u %u", corrected, uncorrected, pending, failed);
    return check(value);
}
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type, code; union { unsigned ui; double d; } value; } Field;
int nvmlDeviceGetFieldValues(Handle *h, int count, Field *to) {
    for (int i = 0; i < count; i++) to[i].code = number(get("%s.recovery", h->key), &to[i].value.ui);
    return SUCCESS;
}
int nvmlDeviceGetTopologyCommonAncestor(Handle *a, Handle *b, unsigned *to) { return number(get("ancestor.%d.%d", a->gpu, b->gpu), to); }
int nvmlDeviceGetNvLinkState(Handle *h, unsigned link, unsigned *to) {
    char *value = get("%s.link.%u", h->key, link);
    if (!value) return INVALID;
    *to = strcmp(value, "off") != 0;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Handle *h, unsigned link, unsigned *to) {
    *to = strcmp(get("%s.link.%u", h->key, link), "switch") ? 0 : 2;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle *h, unsigned link, Pci *to) {
    return text(get("%s.link.%u", h->key, link), to->busid, sizeof to->busid);
}
static int processes(const char *value, unsigned *count, Process *to) {
    unsigned found = 0;
    if (check(value)) return check(value);
    for (const char *at = value; at && *at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL) {
        if (to && found < *count) sscanf(at, "%u:%llu", &to[found].pid, &to[found].memory);
        found++;
    }
    *count = found;
    return to || !found ? SUCCESS : INSUFFICIENT_SIZE;
}
#ifdef OLD
int nvmlDeviceGetComputeRunningProcesses_v2(Handle *h, unsigned *count, Process *to) { return processes(get("%s.procs", h->key), count, to); }
#else
int nvmlDeviceGetComputeRunningProcesses_v3(Handle *h, unsigned *count, Process *to) { return processes(get("%s.procs", h->key), count, to); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle *h, unsigned *count, Process *to) { return processes(get("%s.graphics", h->key), count, to); }
#endif
typedef struct { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, mask; } Fabric;
int nvmlDeviceGetGpuFabricInfoV(Handle *h, Fabric *to) {
    char *value = get("%s.fabric", h->key);
    unsigned state = 0;
    if (check(value)) return check(value);
    sscanf(value, "%u %u", &state, &to->clique);
    to->state = state;
    to->status = 0;
    memset(to->cluster, 0xab, sizeof to->cluster);
    return SUCCESS;
}
