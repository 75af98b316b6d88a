/* Answers of tt-kmd for the nodes of a testbed, from the recorded sysfs. Loaded with LD_PRELOAD.

   A node of a testbed cannot be opened. Here an open gives /dev/null, and the two questions that tt-umd asks when it lists devices are
   answered: _IO(0xFA, 0) GET_DEVICE_INFO and _IO(0xFA, 5) GET_DRIVER_INFO of tt-kmd's ioctl.h. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { GET_DEVICE_INFO = 0xFA00, GET_DRIVER_INFO = 0xFA05, MOST = 4096 };

struct device_info {
    uint32_t in_size, out_size;
    uint16_t vendor, device, subsystem_vendor, subsystem, bus_dev_fn, dma_log2, domain, reserved;
};
struct driver_info {
    uint32_t in_size, out_size, version;
    uint8_t major, minor, patch, reserved;
};

static int number_of[MOST]; /* by descriptor, the number of the node and 1 */

static unsigned read_hex(const char *folder, const char *name) {
    char path[512];
    unsigned value = 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%x", &value) != 1) value = 0;
        fclose(file);
    }
    return value;
}

static int node(const char *path) {
    int number, end = 0;
    return sscanf(path, "/dev/tenstorrent/%d%n", &number, &end) == 1 && !path[end] ? number : -1;
}

static int open_node(const char *path, int number) {
    struct stat status;
    if (stat(path, &status)) return -1; /* ENOENT, as without the shim */
    if (!(status.st_mode & 0666)) {
        errno = EACCES;
        return -1;
    }
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int descriptor = next("/dev/null", O_RDWR | O_CLOEXEC);
    if (descriptor >= 0 && descriptor < MOST) number_of[descriptor] = number + 1;
    return descriptor;
}

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...) {                               \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        int mode = va_arg(rest, int), number = node(path);                     \
        va_end(rest);                                                          \
        if (number >= 0) return open_node(path, number);                       \
        int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);         \
        return next(path, flags, mode);                                        \
    }
OPEN(open)
OPEN(open64)

int close(int descriptor) {
    if (descriptor >= 0 && descriptor < MOST) number_of[descriptor] = 0;
    int (*next)(int) = dlsym(RTLD_NEXT, "close");
    return next(descriptor);
}

static int tell_device(int number, struct device_info *info) {
    char pattern[128];
    glob_t found;
    unsigned domain, bus, device, function;
    snprintf(pattern, sizeof pattern, "/sys/bus/pci/devices/*/tenstorrent/tenstorrent!%d", number);
    if (glob(pattern, 0, NULL, &found)) {
        errno = ENODEV;
        return -1;
    }
    char *folder = found.gl_pathv[0];
    *strstr(folder, "/tenstorrent/") = '\0';
    sscanf(strrchr(folder, '/') + 1, "%x:%x:%x.%x", &domain, &bus, &device, &function);
    memset(&info->out_size, 0, sizeof *info - sizeof info->in_size);
    info->out_size = sizeof *info - sizeof info->in_size;
    info->vendor = read_hex(folder, "vendor");
    info->device = read_hex(folder, "device");
    info->subsystem_vendor = read_hex(folder, "subsystem_vendor");
    info->subsystem = read_hex(folder, "subsystem_device");
    info->bus_dev_fn = bus << 8 | device << 3 | function;
    info->domain = domain;
    globfree(&found);
    return 0;
}

int ioctl(int descriptor, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (descriptor < 0 || descriptor >= MOST || !number_of[descriptor]) {
        int (*next)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
        return next(descriptor, request, argument);
    }
    if (request == GET_DEVICE_INFO) return tell_device(number_of[descriptor] - 1, argument);
    if (request == GET_DRIVER_INFO) {
        struct driver_info *info = argument;
        *info = (struct driver_info){info->in_size, sizeof *info - sizeof info->in_size, 2, 2, 6, 0, 0};
        return 0;
    }
    errno = ENOTTY;
    return -1;
}
