/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * A session with the daemon: what a process has in the place of a kernel driver
 * (docs/virtio-rdma-process.md). One request is under way at a time.
 */
#ifndef VRDMA_SESSION_H
#define VRDMA_SESSION_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#include "apart.h"
#include "events.h"
#include "virtio_rdma_abi.h"

enum vrdma_op {
	VRDMA_HELLO = 1,
	VRDMA_MEMORY_ADD,
	VRDMA_MEMORY_REMOVE,
	VRDMA_CHANNEL_ADD,
	VRDMA_CHANNEL_REMOVE,
	VRDMA_ADDRESS,
	VRDMA_COMMAND,
	VRDMA_MIRROR_ADD,
	VRDMA_CM_ADD = 16,
	VRDMA_CM_REMOVE,
	VRDMA_CM_COMMAND,
};

#define VRDMA_FILES 4u

/* What is asked: an operation, its body, and a descriptor that goes with it (or -1). */
struct vrdma_request {
	enum vrdma_op op;
	const void *body;
	size_t len;
	int file;
};

/* Where the answer goes; its body has exactly `len` bytes, and as many descriptors as `files`. */
struct vrdma_answer {
	void *body;
	size_t len;
	int *fds;
	unsigned int files;
};

struct vrdma_channel {
	struct vrdma_channel *next;
	struct ibv_comp_channel *of;	/* NULL: destroyed, and a thread sleeps in it */
	uint32_t number;
	struct vrdma_events events;
};

/* A CQ whose users may sleep at a channel. */
struct vrdma_sleeper {
	struct vrdma_sleeper *next;
	const struct ibv_cq *cq;
};

struct vrdma_piece {
	struct vrdma_piece *next;
	uintptr_t base;
	size_t len;
};

/* A context gets no more of the device. */
#define VRDMA_DB_PAGES 256u
#define VRDMA_DB_PAGE ((size_t)4096)
#define VRDMA_DB_LEN (VRDMA_DB_PAGES * VRDMA_DB_PAGE)

/* Of the table of regions in files of the program's. */
#define VRDMA_LENT_BUCKETS 1024u

struct vrdma_session {
	struct vrdma_session *next;
	struct ibv_context *context;
	int index;			/* the device's; 0: a look at one */
	int socket;
	struct vrdma_file own;		/* the socket; if it is not, none is ours any more */
	int kick;
	int status;
	struct vrdma_events events;
	uint32_t alive;
	uint32_t comp_vectors;
	uint16_t addresses;
	uint8_t mac[6];
	struct virtio_rdma_query_device_resp attr;	/* as it was when the device was opened */
	pthread_mutex_t lock;		/* the socket */
	pthread_mutex_t tables;		/* what follows */
	int cancel;			/* of who has them */
	struct vrdma_channel *channels;
	uint32_t late;			/* events that wait to be put back into their channels */
	struct vrdma_sleeper *sleepers;
	struct vrdma_piece *pieces;	/* memory that the device reaches */
	struct vrdma_loan *loans;	/* and files of the program's (loan.h) */
	struct vrdma_lent *lent[VRDMA_LENT_BUCKETS];
	pthread_mutex_t adding;		/* doorbell pages */
	uint8_t *doorbells;		/* pages of a file of its own, from its beginning on */
	uint32_t db_count;		/* of them the device has so many */
	void *status_map;
	pthread_t watcher;
	int watched;
};

/* Connects to a socket and says HELLO, for a context or (NULL) for a look; an errno. */
int vrdma_session_open(struct vrdma_session *session, const char *path,
		       struct ibv_context *context);
void vrdma_session_close(struct vrdma_session *session);
struct vrdma_session *vrdma_session_of(struct ibv_context *context);
/* In a child of fork(): what the parent's was, which can be read and nothing else. */
const struct vrdma_session *vrdma_session_inherited(const struct ibv_context *context);
/* Whether a session of the device with this index has ended, or is a parent's; and one goes on. */
bool vrdma_session_is_lost(int index);
bool vrdma_session_is_live(int index);
static inline void vrdma_tables_lock(struct vrdma_session *session)
{
	vrdma_hold(&session->tables, &session->cancel);
}

static inline void vrdma_tables_unlock(struct vrdma_session *session)
{
	vrdma_let_go(&session->tables, &session->cancel);
}

/* An errno; EBADF if the program has closed the session's descriptors. */
int vrdma_ask(struct vrdma_session *session, const struct vrdma_request *request,
	      const struct vrdma_answer *answer);
/* A command of the device; `cookie` and `channel` are of an object that it makes. */
struct vrdma_made {
	uint64_t cookie;
	uint32_t channel;
};
int vrdma_command(struct ibv_context *context, uint16_t opcode, const void *req, size_t req_len,
		  void *resp, size_t resp_len);
int vrdma_command_making(struct ibv_context *context, uint16_t opcode, struct vrdma_made made,
			 const void *req, size_t req_len, void *resp, size_t resp_len);
int vrdma_destroy(struct ibv_context *context, uint16_t opcode, uint32_t object);
/* A CQ with a channel is there; an errno. It is gone. */
int vrdma_sleeper_add(struct vrdma_session *session, const struct ibv_cq *cq);
void vrdma_sleeper_drop(struct vrdma_session *session, const struct ibv_cq *cq);
/* Watches the socket, and lets everyone know when it ends. */
int vrdma_watch(struct vrdma_session *session);

/* kernel_dm.c: device memory, of which a context has so many bytes. */
#define VRDMA_DM_SIZE ((size_t)1 << 20)
void vrdma_dm_forget(const struct ibv_context *context, uint32_t lkey);
void vrdma_dm_end(const struct ibv_context *context);
void vrdma_dm_before_fork(void);
void vrdma_dm_after_fork(int in_child);

/* memory.c: pages of this process that the device can reach, and whose they are. */
int vrdma_sealed_file(size_t len);
/* The errno to give where that has just failed. */
int vrdma_no_file(void);
void *vrdma_pages_alloc(size_t len);
void vrdma_pages_before_fork(void);
void vrdma_pages_after_fork(int in_child);
int vrdma_pages_free(void *addr, size_t len);
/* Has the device reach a range; EFAULT where that is not possible. */
int vrdma_share(struct vrdma_session *session, const void *addr, size_t len);
int vrdma_is_own(const void *addr);
int vrdma_memory_add(struct vrdma_session *session, void *base, size_t len, int fd,
		     uint64_t offset);
void vrdma_memory_remove(struct vrdma_session *session, void *base, size_t len);
struct virtio_rdma_page_list vrdma_list(const void *addr, size_t len);

#endif
