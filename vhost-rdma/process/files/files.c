// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Files that programs look for beside a verbs device, for devices that have none. Preloaded, never
 * linked.
 *
 * Some programs do not take libibverbs' word: UCX opens a device only if /dev/infiniband/NAME is a
 * character device that it may read and write (uct_ib_device_is_accessible), it and NCCL read the
 * types of addresses in /sys/class/infiniband/NAME/ports/1, and Mooncake passes over a device whose
 * place in the machine it is not told (/sys/class/infiniband/NAME/../.., realpath(3)). Those are
 * files of a kernel's driver, and nobody may mount anything there without privilege. So where such
 * a file is missing, and only there, a call that asked for it by its path finds what the file would
 * say; the device node is /dev/null, which may be opened and does nothing. UCX from 1.19 on asks
 * for the network interface of an address (gid_attrs/ndevs), and reaches no peer to whom none of
 * that interface's routes leads: it is told the one of the default route. The place is that of a
 * device without hardware: /sys/devices/virtual/infiniband/NAME, as the kernel has it for rxe.
 *
 * Paths of directories, and calls relative to a directory's descriptor, find what there is:
 * nothing.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NODE "/dev/infiniband/vhost_rdma"
#define CLASS "/sys/class/infiniband/vhost_rdma"
/* Where the directory of the class is a link to. */
#define PLACE "/sys/devices/virtual/infiniband/vhost_rdma"
#define NODES_STAND_IN "/dev/null"

/* What comes after a name and its number, or NULL. */
static const char *after(const char *path, const char *name)
{
	size_t len = strlen(name);

	if (strncmp(path, name, len) || !isdigit((unsigned char)path[len]))
		return NULL;
	path += len;
	while (isdigit((unsigned char)*path))
		path++;
	return path;
}

static int is_node(const char *path)
{
	const char *rest = after(path, NODE);

	return rest && !*rest;
}

/* The interface by which others are reached, as a line: that of the default route (proc(5),
 * /proc/net/route: names, destinations and masks). Where there is none, only what is here is. */
static const char *interface_of_default_route(void)
{
	static __thread char line[IF_NAMESIZE + 1];
	char text[8192], *at, *end;
	unsigned long to, mask;
	ssize_t len = -1;
	int fd;

	fd = open("/proc/net/route", O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		len = read(fd, text, sizeof(text) - 1);
		close(fd);
	}
	text[len > 0 ? len : 0] = '\0';
	strcpy(line, "lo\n");
	for (at = text; (end = strchr(at, '\n')); at = end + 1) {
		char name[IF_NAMESIZE];

		*end = '\0';
		if (sscanf(at, "%15s %lx %*s %*s %*s %*s %*s %lx", name, &to, &mask) == 3 && !to &&
		    !mask) {
			snprintf(line, sizeof(line), "%s\n", name);
			break;
		}
	}
	return line;
}

/* What a file of the device says; NULL if it is none that we know. */
static const char *text_of(const char *path)
{
	static const struct {
		const char *name;
		const char *text;
	} files[] = {
		{ "/node_type", "1: CA\n" },
		{ "/node_desc", "vhost-rdma\n" },
		{ "/ports/1/link_layer", "Ethernet\n" },
		{ "/ports/1/state", "4: ACTIVE\n" },
		{ "/ports/1/phys_state", "5: LinkUp\n" },
		{ "/ports/1/lid", "0x0\n" },
		{ "/ports/1/sm_lid", "0x0\n" },
		{ "/ports/1/pkeys/0", "0xffff\n" },
	};
	const char *rest = after(path, CLASS);
	size_t i;

	if (!rest)
		rest = after(path, PLACE);
	for (i = 0; rest && i < sizeof(files) / sizeof(*files); i++) {
		if (!strcmp(rest, files[i].name))
			return files[i].text;
	}
	if (!rest)
		return NULL;
	/* All addresses of the device are of one kind, and reached in one way. */
	path = after(rest, "/ports/1/gid_attrs/types/");
	if (path && !*path)
		return "RoCE v2\n";
	path = after(rest, "/ports/1/gid_attrs/ndevs/");
	return path && !*path ? interface_of_default_route() : NULL;
}

static int is_missing(void)
{
	return errno == ENOENT || errno == ENOTDIR;
}

static int open_text(const char *text, int flags)
{
	size_t len = strlen(text);
	int fd;

	if ((flags & O_ACCMODE) != O_RDONLY) {
		errno = EACCES;
		return -1;
	}
	fd = memfd_create("vhost-rdma-file", flags & O_CLOEXEC ? MFD_CLOEXEC : 0);
	if (fd < 0)
		return -1;
	if (write(fd, text, len) != (ssize_t)len || lseek(fd, 0, SEEK_SET)) {
		close(fd);
		errno = EIO;
		return -1;
	}
	return fd;
}

/* Calls `name` as the C library has it. */
#define REAL(result, name, ...)                                                                    \
	static result (*real)(__VA_ARGS__);                                                        \
	if (!real)                                                                                 \
		real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name);                            \
	if (!real) {                                                                               \
		errno = ENOSYS;                                                                    \
		return (result)-1;                                                                 \
	}

typedef int opening(const char *, int, ...);

static int opened(opening *real, const char *path, int flags, mode_t mode)
{
	int fd = real(path, flags, mode);
	const char *text;

	if (fd >= 0 || !is_missing())
		return fd;
	if (is_node(path))
		return real(NODES_STAND_IN, flags & ~(O_CREAT | O_EXCL | O_TRUNC));
	text = text_of(path);
	return text ? open_text(text, flags) : fd;
}

static mode_t mode_of(int flags, va_list list)
{
	/* O_TMPFILE has the bit of O_DIRECTORY, with which no mode comes. */
	int makes = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;

	return makes ? va_arg(list, mode_t) : 0;
}

#define OPEN(name)                                                                                 \
	EXPORT int name(const char *path, int flags, ...)                                          \
	{                                                                                          \
		static opening *real;                                                              \
		va_list list;                                                                      \
		mode_t mode;                                                                       \
                                                                                                   \
		if (!real)                                                                         \
			real = (opening *)dlsym(RTLD_NEXT, #name);                                 \
		if (!real) {                                                                       \
			errno = ENOSYS;                                                            \
			return -1;                                                                 \
		}                                                                                  \
		va_start(list, flags);                                                             \
		mode = mode_of(flags, list);                                                       \
		va_end(list);                                                                      \
		return opened(real, path, flags, mode);                                            \
	}

OPEN(open)
OPEN(open64)

/* Of programs that were built with _FORTIFY_SOURCE. */
#define OPEN_2(name)                                                                               \
	EXPORT int name(const char *path, int flags)                                               \
	{                                                                                          \
		REAL(int, #name, const char *, int)                                                \
		int fd = real(path, flags);                                                        \
		const char *text;                                                                  \
                                                                                                   \
		if (fd >= 0 || !is_missing())                                                      \
			return fd;                                                                 \
		if (is_node(path))                                                                 \
			return real(NODES_STAND_IN, flags & ~(O_EXCL | O_TRUNC));                  \
		text = text_of(path);                                                              \
		return text ? open_text(text, flags) : fd;                                         \
	}

OPEN_2(__open_2)
OPEN_2(__open64_2)

#define FOPEN(name)                                                                                \
	EXPORT FILE *name(const char *path, const char *mode)                                      \
	{                                                                                          \
		static FILE *(*real)(const char *, const char *);                                  \
		FILE *file;                                                                        \
		const char *text;                                                                  \
		int fd;                                                                            \
                                                                                                   \
		if (!real)                                                                         \
			real = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, #name);   \
		if (!real) {                                                                       \
			errno = ENOSYS;                                                            \
			return NULL;                                                               \
		}                                                                                  \
		file = real(path, mode);                                                           \
		if (file || !is_missing() || *mode != 'r')                                         \
			return file;                                                               \
		text = text_of(path);                                                              \
		fd = text ? open_text(text, strchr(mode, '+') ? O_RDWR : O_RDONLY) : -1;           \
		return fd < 0 ? NULL : fdopen(fd, "r");                                            \
	}

FOPEN(fopen)
FOPEN(fopen64)

/* Whether a file that we make up may be used so: as any file of sysfs. */
static int may_access(int mode)
{
	if (mode & (W_OK | X_OK)) {
		errno = EACCES;
		return -1;
	}
	return 0;
}

#define ACCESS(name)                                                                               \
	EXPORT int name(const char *path, int mode)                                                \
	{                                                                                          \
		REAL(int, #name, const char *, int)                                                \
		int ret = real(path, mode);                                                        \
                                                                                                   \
		if (!ret || !is_missing())                                                         \
			return ret;                                                                \
		if (is_node(path))                                                                 \
			return real(NODES_STAND_IN, mode);                                         \
		return text_of(path) ? may_access(mode) : ret;                                     \
	}

ACCESS(access)
ACCESS(eaccess)
ACCESS(euidaccess)

/* What a shell asks by (`test -r`). A path that we know has no need of the directory. */
EXPORT int faccessat(int dir, const char *path, int mode, int flags)
{
	REAL(int, "faccessat", int, const char *, int, int)
	int ret = real(dir, path, mode, flags);

	if (!ret || !is_missing())
		return ret;
	if (is_node(path))
		return real(dir, NODES_STAND_IN, mode, flags);
	return text_of(path) ? may_access(mode) : ret;
}

/* Of what a file that we make up is: as any file of sysfs. */
#define FILL(about)                                                                                \
	do {                                                                                       \
		memset(about, 0, sizeof(*(about)));                                                \
		(about)->st_mode = S_IFREG | 0444;                                                 \
		(about)->st_nlink = 1;                                                             \
		(about)->st_size = 4096;                                                           \
	} while (0)

#define STAT(name, type)                                                                           \
	EXPORT int name(const char *path, struct type *about)                                      \
	{                                                                                          \
		REAL(int, #name, const char *, struct type *)                                      \
		int ret = real(path, about);                                                       \
                                                                                                   \
		if (!ret || !is_missing())                                                         \
			return ret;                                                                \
		if (is_node(path))                                                                 \
			return real(NODES_STAND_IN, about);                                        \
		if (!text_of(path))                                                                \
			return ret;                                                                \
		FILL(about);                                                                 \
		return 0;                                                                          \
	}

STAT(stat, stat)
STAT(stat64, stat64)

/* As glibc before 2.33 had it. */
#define XSTAT(name, type)                                                                          \
	EXPORT int name(int version, const char *path, struct type *about)                         \
	{                                                                                          \
		REAL(int, #name, int, const char *, struct type *)                                 \
		int ret = real(version, path, about);                                              \
                                                                                                   \
		if (!ret || !is_missing())                                                         \
			return ret;                                                                \
		if (is_node(path))                                                                 \
			return real(version, NODES_STAND_IN, about);                               \
		if (!text_of(path))                                                                \
			return ret;                                                                \
		FILL(about);                                                                 \
		return 0;                                                                          \
	}

XSTAT(__xstat, stat)
XSTAT(__xstat64, stat64)

/* Where a path leads that begins at a device: by its text, since nothing is there. */
static char *place_of(const char *path)
{
	const char *rest = after(path, CLASS), *end;
	char place[PATH_MAX];
	size_t len;

	if (!rest || (*rest && *rest != '/') || strlen(path) >= sizeof(place) / 2) {
		errno = ENOENT;
		return NULL;
	}
	len = (size_t)(rest - path) - strlen(CLASS) + strlen(PLACE);
	snprintf(place, len + 1, PLACE "%s", path + strlen(CLASS));
	for (; *rest; rest = end) {
		rest += strspn(rest, "/");
		end = rest + strcspn(rest, "/");
		if (end - rest == 2 && !strncmp(rest, "..", 2)) {
			while (len && place[--len] != '/')
				;
		} else if (end > rest && strncmp(rest, ".", (size_t)(end - rest))) {
			place[len++] = '/';
			memcpy(place + len, rest, (size_t)(end - rest));
			len += (size_t)(end - rest);
		}
		place[len] = '\0';
	}
	rest = after(place, PLACE);
	if (!rest)
		return canonicalize_file_name(len ? place : "/");
	if (!*rest || text_of(place))
		return strdup(place);
	errno = ENOENT;
	return NULL;
}

EXPORT char *realpath(const char *path, char *resolved)
{
	char *found = canonicalize_file_name(path);

	if (!found && path && is_missing())
		found = place_of(path);
	if (!found || !resolved)
		return found;
	strcpy(resolved, found);
	free(found);
	return resolved;
}

/* Of programs that were built with _FORTIFY_SOURCE. */
EXPORT char *__realpath_chk(const char *path, char *resolved, size_t len)
{
	if (len < PATH_MAX)
		abort();
	return realpath(path, resolved);
}
