// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Events on their way to the program: what is read, what is counted, and what goes with an object.
 *
 * The kernel counts the events of an object that were read, and who destroys the object waits until
 * as many are acknowledged (ibv_destroy_cq(3); uverbs_std_types_cq.c, `comp_events_reported`): a
 * thread that has an event in its hands has the object too. Here the channel is a socket, so to
 * read and to count has to be one step against whoever takes an object's events out: both hold the
 * session's `tables`. What libibverbs counts up by acknowledgements is counted down by events that
 * were read, so that 0 says that there is none.
 */
#define _GNU_SOURCE
#include "virtio_rdma.h"

#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "events.h"
#include "session.h"

/* An event of another object that found no room when it was put back. */
struct vrdma_late {
	struct vrdma_late *next;
	uint64_t event[2];
	size_t size;
};

static void count(pthread_mutex_t *mutex, uint32_t *events)
{
	pthread_mutex_lock(mutex);
	--*events;
	pthread_mutex_unlock(mutex);
}

static void count_async(const struct ib_uverbs_async_event_desc *event)
{
	void *element = (void *)(uintptr_t)event->element;
	struct ibv_srq *srq = element;
	struct ibv_cq *cq = element;
	struct ibv_qp *qp = element;

	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		count(&cq->mutex, &cq->async_events_completed);
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		count(&qp->mutex, &qp->events_completed);
		break;
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		count(&srq->mutex, &srq->events_completed);
		break;
	default:
		/* A port's, or the device's. */
		break;
	}
}

static void count_read(const void *event, size_t size)
{
	const struct ib_uverbs_comp_event_desc *completion = event;
	struct ibv_cq *cq;

	if (size == sizeof(struct ib_uverbs_async_event_desc)) {
		count_async(event);
		return;
	}
	cq = (void *)(uintptr_t)completion->cq_handle;
	count(&cq->mutex, &cq->comp_events_completed);
}

/* ---- Events that are late, under the session's `tables` -------------------------------------- */

/* As many as there is room for. While one is left the channel is full, so that somebody reads. */
static void put_late(struct vrdma_session *session, struct vrdma_events *events)
{
	struct vrdma_late *late;

	while ((late = events->late)) {
		if (send(events->put, late->event, late->size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
			return;
		events->late = late->next;
		session->late--;
		free(late);
	}
}

static void put_back(struct vrdma_session *session, struct vrdma_events *events,
		     const uint64_t *event, size_t size)
{
	struct vrdma_late *late, **at;

	if (!events->late && send(events->put, event, size, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
		return;
	late = calloc(1, sizeof(*late));
	if (!late)
		return;
	memcpy(late->event, event, size);
	late->size = size;
	for (at = &events->late; *at; at = &(*at)->next)
		;
	*at = late;
	session->late++;
}

static void drop_late(struct vrdma_session *session, struct vrdma_events *events, uint64_t element)
{
	struct vrdma_late **at = &events->late, *late;

	while ((late = *at)) {
		if (late->event[0] != element) {
			at = &late->next;
			continue;
		}
		*at = late->next;
		session->late--;
		free(late);
	}
}

void vrdma_events_drop(struct vrdma_session *session, struct vrdma_events *events,
		       uint64_t element, size_t size)
{
	uint64_t event[2];
	int bytes, left;

	drop_late(session, events, element);
	/*
	 * Bytes of all packets (unix(7), SIOCINQ): each is looked at once, what is put back is
	 * last. The device may meanwhile fill what has become free.
	 */
	if (ioctl(events->take, FIONREAD, &bytes) < 0)
		return;
	for (left = bytes / (int)size; left > 0; left--) {
		if (recv(events->take, event, size, MSG_DONTWAIT) != (ssize_t)size)
			break;
		if (event[0] != element)
			put_back(session, events, event, size);
	}
	put_late(session, events);
}

void vrdma_events_end(struct vrdma_session *session, struct vrdma_events *events)
{
	struct vrdma_late *late;

	while ((late = events->late)) {
		events->late = late->next;
		session->late--;
		free(late);
	}
}

/* ---- Reading --------------------------------------------------------------------------------- */

static struct vrdma_events *events_of(struct vrdma_session *session, int fd)
{
	struct vrdma_channel *channel;

	if (session->events.take == fd)
		return &session->events;
	for (channel = session->channels; channel; channel = channel->next) {
		if (channel->of && channel->events.take == fd)
			return &channel->events;
	}
	return NULL;
}

/* -1 and errno, also at the end of a channel: a device that is lost is EIO, as the kernel's. */
static ssize_t failed(ssize_t got)
{
	if (got >= 0)
		errno = EIO;
	return -1;
}

/* One event, if there still is one, and counted. */
static ssize_t take(struct vrdma_session *session, int fd, void *event, size_t size)
{
	struct vrdma_events *events;
	ssize_t got;

	vrdma_tables_lock(session);
	got = recv(fd, event, size, MSG_DONTWAIT);
	if (got == (ssize_t)size) {
		count_read(event, size);
		events = session->late ? events_of(session, fd) : NULL;
		if (events)
			put_late(session, events);
	}
	vrdma_tables_unlock(session);
	return got;
}

ssize_t vrdma_read_event(struct ibv_context *context, int fd, void *event, size_t size)
{
	struct vrdma_session *session;
	ssize_t got;

	for (;;) {
		/* Waits as read() does, signals included, and takes nothing. */
		got = recv(fd, event, size, MSG_PEEK);
		if (got != (ssize_t)size)
			return failed(got);
		session = vrdma_session_of(context);
		/* A child of fork() has its parent's channels and no objects. */
		if (!session)
			return read(fd, event, size);
		got = take(session, fd, event, size);
		if (got == (ssize_t)size)
			return got;
		/* Another thread had it, or its object is gone. */
		if (got >= 0 || errno != EAGAIN)
			return failed(got);
	}
}

void vrdma_await_acks(pthread_mutex_t *mutex, pthread_cond_t *cond, const uint32_t *events,
		      const uint32_t *others)
{
	pthread_mutex_lock(mutex);
	while (*events || *others)
		pthread_cond_wait(cond, mutex);
	pthread_mutex_unlock(mutex);
}
