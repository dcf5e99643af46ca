/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * What lies where in this process, as the kernel tells it.
 */
#ifndef VRDMA_MAPS_H
#define VRDMA_MAPS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* A mapping. */
struct vrdma_map {
	uintptr_t from;
	uintptr_t to;
	uint64_t offset;	/* of `from` in its file */
	uint64_t dev;		/* as st_dev of fstat(2); 0 of memory that has no file */
	uint64_t ino;
	int readable;
	int writable;
	int shared;
};

/* A look at them, from low addresses to high ones. */
struct vrdma_maps {
	int fd;
	FILE *text;		/* where the kernel has to be asked for all of them */
};

/* 0: it cannot be had. */
int vrdma_maps_open(struct vrdma_maps *maps);
/* The mapping that an address lies in; 0: none. */
int vrdma_maps_at(struct vrdma_maps *maps, uintptr_t at, struct vrdma_map *map);
void vrdma_maps_close(struct vrdma_maps *maps);

#endif
