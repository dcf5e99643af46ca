/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Events that the program reads, and what becomes of them when their object goes (events.c).
 */
#ifndef VRDMA_EVENTS_H
#define VRDMA_EVENTS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <infiniband/verbs.h>

struct vrdma_session;
struct vrdma_late;

/* A channel of events: where they are received, and where those of others are put back. */
struct vrdma_events {
	int take;
	int put;
	struct vrdma_late *late;	/* those that found no room */
};

/* As read(): the next event of a channel, which the end of its object waits for from now on. */
ssize_t vrdma_read_event(struct ibv_context *context, int fd, void *event, size_t size);
/* Takes events of one object out of a channel; the session's `tables` is held. */
void vrdma_events_drop(struct vrdma_session *session, struct vrdma_events *events,
		       uint64_t element, size_t size);
/* The channel is gone; `tables` is held, or nobody else is there. */
void vrdma_events_end(struct vrdma_session *session, struct vrdma_events *events);
/* Waits until all events of an object that were read are acknowledged. */
void vrdma_await_acks(pthread_mutex_t *mutex, pthread_cond_t *cond, const uint32_t *events,
		      const uint32_t *others);

#endif
