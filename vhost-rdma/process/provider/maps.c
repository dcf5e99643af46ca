// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Mappings by address. From Linux 6.11 on the kernel answers for one address (fs/proc/task_mmu.c,
 * PROCMAP_QUERY), in the same time however many mappings there are. Before, and where a filter of
 * system calls forbids it, /proc/self/maps is read up to the address.
 */
#define _GNU_SOURCE
#include "maps.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* As linux/fs.h of Linux 6.11 has it, which is newer than the headers that we are built with. */
struct query {
	uint64_t size;
	uint64_t flags;
	uint64_t addr;
	uint64_t vma_start;
	uint64_t vma_end;
	uint64_t vma_flags;
	uint64_t vma_page_size;
	uint64_t vma_offset;
	uint64_t inode;
	uint32_t dev_major;
	uint32_t dev_minor;
	uint32_t vma_name_size;
	uint32_t build_id_size;
	uint64_t vma_name_addr;
	uint64_t build_id_addr;
};

#define QUERY _IOWR('f', 17, struct query)
enum { READABLE = 1, WRITABLE = 2, SHARED = 8 };

int vrdma_maps_open(struct vrdma_maps *maps)
{
	maps->text = NULL;
	maps->fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	return maps->fd >= 0;
}

void vrdma_maps_close(struct vrdma_maps *maps)
{
	if (maps->text)
		fclose(maps->text);
	else
		close(maps->fd);
}

static int read_to(FILE *text, uintptr_t at, struct vrdma_map *map)
{
	unsigned long from, to, offset, ino;
	unsigned int dev_major, dev_minor;
	char rights[5];

	while (fscanf(text, "%lx-%lx %4s %lx %x:%x %lu%*[^\n]", &from, &to, rights, &offset,
		      &dev_major, &dev_minor, &ino) == 7) {
		if (to <= at)
			continue;
		*map = (struct vrdma_map){
			.from = from,
			.to = to,
			.offset = offset,
			.dev = makedev(dev_major, dev_minor),
			.ino = ino,
			.readable = rights[0] == 'r',
			.writable = rights[1] == 'w',
			.shared = rights[3] == 's',
		};
		return from <= at;
	}
	return 0;
}

int vrdma_maps_at(struct vrdma_maps *maps, uintptr_t at, struct vrdma_map *map)
{
	struct query query = { .size = sizeof(query), .addr = at };

	if (!maps->text && ioctl(maps->fd, QUERY, &query)) {
		if (errno == ENOENT)
			return 0;
		maps->text = fdopen(maps->fd, "r");
	}
	if (maps->text)
		return read_to(maps->text, at, map);
	/* Neither is there: as if nothing were known. */
	if (!query.vma_end)
		return 0;
	*map = (struct vrdma_map){
		.from = query.vma_start,
		.to = query.vma_end,
		.offset = query.vma_offset,
		.dev = makedev(query.dev_major, query.dev_minor),
		.ino = query.inode,
		.readable = !!(query.vma_flags & READABLE),
		.writable = !!(query.vma_flags & WRITABLE),
		.shared = !!(query.vma_flags & SHARED),
	};
	return 1;
}
