/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * What the program does with its descriptors and threads is its own affair (apart.c).
 */
#ifndef VRDMA_APART_H
#define VRDMA_APART_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* A descriptor of ours, and what it was when we got it. */
struct vrdma_file {
	int fd;
	dev_t dev;
	ino_t ino;
};

struct vrdma_file vrdma_file_of(int fd);
/* Whether the number still is that file. */
bool vrdma_file_is_ours(const struct vrdma_file *file);
/* Nothing where it is not. */
void vrdma_file_close(const struct vrdma_file *file);

/* Nobody is cancelled between the two: `before` is what there was before. */
void vrdma_hold(pthread_mutex_t *mutex, int *before);
void vrdma_let_go(pthread_mutex_t *mutex, const int *before);

#endif
