// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Messages to the daemon, and the end of a session.
 *
 * A child of fork() has the descriptors too: with them it would keep its parent's session alive. It
 * closes them before anything else happens in it, and has no device (ibv_fork_init(3) promises no
 * more) until it opens one.
 */
#define _GNU_SOURCE
#include "virtio_rdma.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "loan.h"
#include "private.h"
#include "session.h"

static pthread_mutex_t sessions_lock = PTHREAD_MUTEX_INITIALIZER;
static struct vrdma_session *sessions;
static struct vrdma_session *inherited;
static int sessions_cancel;

/* What is a session's alone; where it receives events is the context's to close. */
static void close_all(struct vrdma_session *session)
{
	struct vrdma_channel *channel;

	if (!vrdma_file_is_ours(&session->own))
		return;
	close(session->socket);
	if (session->kick >= 0)
		close(session->kick);
	if (session->events.put >= 0)
		close(session->events.put);
	for (channel = session->channels; channel; channel = channel->next)
		close(channel->events.put);
}

static void lock_sessions(void)
{
	vrdma_hold(&sessions_lock, &sessions_cancel);
}

static void unlock_sessions(void)
{
	vrdma_let_go(&sessions_lock, &sessions_cancel);
}

static void before_fork(void)
{
	lock_sessions();
	vrdma_dm_before_fork();
	vrdma_pages_before_fork();
}

static void in_parent(void)
{
	vrdma_pages_after_fork(0);
	vrdma_dm_after_fork(0);
	unlock_sessions();
}

static void in_child(void)
{
	struct vrdma_session **at, *session;

	for (at = &sessions; (session = *at); at = &session->next) {
		close_all(session);
		vrdma_private_in_child(session);
		session->socket = session->kick = session->own.fd = -1;
		session->events.put = -1;
	}
	/* And what the parent itself was left. */
	*at = inherited;
	inherited = sessions;
	sessions = NULL;
	vrdma_pages_after_fork(1);
	vrdma_dm_after_fork(1);
	unlock_sessions();
}

static void register_at_fork(void)
{
	pthread_atfork(before_fork, in_parent, in_child);
}

/*
 * Handlers run in a child in the order in which they were registered, and the shared heap's has to
 * be the first: before it, what is written to the heap is written to the parent's. It registers as
 * the program is loaded, so these come later.
 */
static void at_fork(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, register_at_fork);
}

struct vrdma_session *vrdma_session_of(struct ibv_context *context)
{
	struct vrdma_session *session;

	lock_sessions();
	for (session = sessions; session && session->context != context; session = session->next)
		;
	unlock_sessions();
	return session;
}

const struct vrdma_session *vrdma_session_inherited(const struct ibv_context *context)
{
	const struct vrdma_session *session;

	lock_sessions();
	for (session = inherited; session && session->context != context; session = session->next)
		;
	unlock_sessions();
	return session;
}

static bool has_ended(const struct vrdma_session *session)
{
	struct pollfd end = { .fd = session->socket, .events = POLLRDHUP };

	return !vrdma_file_is_ours(&session->own) || poll(&end, 1, 0) == 1;
}

bool vrdma_session_is_lost(int index)
{
	const struct vrdma_session *session;

	lock_sessions();
	for (session = sessions; session; session = session->next) {
		if (session->index == index && has_ended(session))
			break;
	}
	if (!session) {
		for (session = inherited; session && session->index != index;)
			session = session->next;
	}
	unlock_sessions();
	return session;
}

bool vrdma_session_is_live(int index)
{
	const struct vrdma_session *session;

	lock_sessions();
	for (session = sessions; session; session = session->next) {
		if (session->index == index && !has_ended(session))
			break;
	}
	unlock_sessions();
	return session;
}

/* A child that is made from now on closes the socket. */
static int session_begin(struct vrdma_session *session, struct ibv_context *context)
{
	int ret = 0;

	session->context = context;
	session->socket = session->kick = session->status = -1;
	session->events.take = session->events.put = -1;
	pthread_mutex_init(&session->lock, NULL);
	pthread_mutex_init(&session->tables, NULL);
	pthread_mutex_init(&session->adding, NULL);
	lock_sessions();
	session->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (session->socket < 0) {
		ret = errno;
	} else {
		session->own = vrdma_file_of(session->socket);
		session->next = sessions;
		sessions = session;
	}
	unlock_sessions();
	return ret;
}

/* The end of it for children too: none has what is closed here. */
static void session_end(struct vrdma_session *session)
{
	struct vrdma_session **at;

	lock_sessions();
	for (at = &sessions; *at && *at != session; at = &(*at)->next)
		;
	if (*at)
		*at = session->next;
	close_all(session);
	unlock_sessions();
}

static int status_to_errno(uint32_t status)
{
	switch (status) {
	case VIRTIO_RDMA_OK:
		return 0;
	case VIRTIO_RDMA_ERR_INVAL:
	case VIRTIO_RDMA_ERR_NOENT:
		return EINVAL;
	case VIRTIO_RDMA_ERR_NOMEM:
		return ENOMEM;
	case VIRTIO_RDMA_ERR_NOTSUPP:
		return EOPNOTSUPP;
	case VIRTIO_RDMA_ERR_BUSY:
		return EBUSY;
	case VIRTIO_RDMA_ERR_PERM:
		return EPERM;
	case VIRTIO_RDMA_ERR_FAULT:
		return EFAULT;
	case VIRTIO_RDMA_ERR_EXIST:
		return EEXIST;
	case VIRTIO_RDMA_ERR_UNREACH:
		return EHOSTUNREACH;
	default:
		return EIO;
	}
}

/* Descriptors that came, as many as wanted; all others are closed. */
static unsigned int take_files(struct msghdr *msg, const struct vrdma_answer *answer)
{
	struct cmsghdr *cmsg = CMSG_FIRSTHDR(msg);
	unsigned int n, i;
	int *fds;

	if (!cmsg || cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS)
		return 0;
	n = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);
	fds = (int *)CMSG_DATA(cmsg);
	for (i = 0; i < n; i++) {
		if (i < answer->files)
			answer->fds[i] = fds[i];
		else
			close(fds[i]);
	}
	return n;
}

static int send_request(int socket, const struct vrdma_request *request)
{
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = {};
	uint32_t head[2] = { htole32(request->op) };
	struct iovec parts[] = {
		{ .iov_base = head, .iov_len = sizeof(head) },
		{ .iov_base = (void *)request->body, .iov_len = request->len },
	};
	struct msghdr msg = { .msg_iov = parts, .msg_iovlen = 2 };
	ssize_t sent;

	if (request->file >= 0) {
		struct cmsghdr *cmsg;

		msg.msg_control = control.room;
		msg.msg_controllen = sizeof(control.room);
		cmsg = CMSG_FIRSTHDR(&msg);
		cmsg->cmsg_level = SOL_SOCKET;
		cmsg->cmsg_type = SCM_RIGHTS;
		cmsg->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(cmsg), &request->file, sizeof(int));
	}
	do {
		sent = sendmsg(socket, &msg, MSG_NOSIGNAL);
	} while (sent < 0 && errno == EINTR);
	return sent < 0 ? EIO : 0;
}

static int receive_answer(int socket, const struct vrdma_answer *answer)
{
	union {
		char room[CMSG_SPACE(VRDMA_FILES * sizeof(int))];
		struct cmsghdr align;
	} control;
	uint32_t head[2];
	struct iovec parts[] = {
		{ .iov_base = head, .iov_len = sizeof(head) },
		{ .iov_base = answer->body, .iov_len = answer->len },
	};
	struct msghdr msg = {
		.msg_iov = parts,
		.msg_iovlen = 2,
		.msg_control = control.room,
		.msg_controllen = sizeof(control.room),
	};
	unsigned int files, i;
	ssize_t got;
	int ret;

	do {
		got = recvmsg(socket, &msg, MSG_CMSG_CLOEXEC);
	} while (got < 0 && errno == EINTR);
	if (got < (ssize_t)sizeof(head))
		return EIO;
	files = take_files(&msg, answer);
	ret = status_to_errno(le32toh(head[0]));
	if (!ret && (size_t)got != sizeof(head) + answer->len)
		ret = EIO;
	if (!ret && files != answer->files)
		ret = files < answer->files && msg.msg_flags & MSG_CTRUNC ? EMFILE : EIO;
	for (i = 0; ret && i < files && i < answer->files; i++)
		close(answer->fds[i]);
	return ret;
}

/*
 * Descriptors that come with an answer need room in the program's table: what finds none the kernel
 * drops, and the device would take it for something that the program has closed. So there has to be
 * room before anything is asked.
 */
static int keep_room(int *room, unsigned int count)
{
	unsigned int i;
	int error;

	for (i = 0; i < count; i++) {
		room[i] = eventfd(0, EFD_CLOEXEC);
		if (room[i] < 0) {
			error = errno;
			while (i)
				close(room[--i]);
			return error;
		}
	}
	return 0;
}

/* Another thread may be quicker than the answer: then that is EMFILE, and the caller's to undo. */
static void give_room(int socket, int *room, unsigned int count)
{
	char byte;

	while (count && recv(socket, &byte, 1, MSG_PEEK) < 0 && errno == EINTR)
		;
	while (count)
		close(room[--count]);
}

static int exchange(struct vrdma_session *session, const struct vrdma_request *request,
		    const struct vrdma_answer *answer, int *room)
{
	int ret;

	pthread_mutex_lock(&session->lock);
	if (session->socket < 0)
		ret = EIO;
	else if (!vrdma_file_is_ours(&session->own))
		ret = EBADF;
	else
		ret = send_request(session->socket, request);
	give_room(ret ? -1 : session->socket, room, answer->files);
	if (!ret)
		ret = receive_answer(session->socket, answer);
	pthread_mutex_unlock(&session->lock);
	return ret;
}

int vrdma_ask(struct vrdma_session *session, const struct vrdma_request *request,
	      const struct vrdma_answer *answer)
{
	int ret, cancel, room[VRDMA_FILES];

	if (!session)
		return EIO;
	/* A command is no point of cancellation, as it is none with the kernel (an ioctl). */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	ret = keep_room(room, answer->files);
	if (!ret)
		ret = exchange(session, request, answer, room);
	pthread_setcancelstate(cancel, NULL);
	return ret;
}

struct hello_answer {
	__le32 version;
	__le32 alive;
	__le32 comp_vectors;
	__le16 addresses;
	uint8_t mac[6];
	__le32 reserved;
};

int vrdma_session_open(struct vrdma_session *session, const char *path,
		       struct ibv_context *context)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	__le32 hello[2] = { htole32(1) };
	struct hello_answer welcome;
	int fds[VRDMA_FILES], ret;
	struct vrdma_request request = { VRDMA_HELLO, hello, sizeof(hello), -1 };
	struct vrdma_answer answer = { &welcome, sizeof(welcome), fds, VRDMA_FILES };

	if (strlen(path) >= sizeof(address.sun_path))
		return ENAMETOOLONG;
	strcpy(address.sun_path, path);
	at_fork();
	ret = session_begin(session, context);
	if (ret)
		return ret;
	do
		ret = connect(session->socket, (struct sockaddr *)&address, sizeof(address));
	while (ret && errno == EINTR);
	ret = ret ? errno : vrdma_ask(session, &request, &answer);
	if (ret) {
		session_end(session);
		return ret;
	}
	session->status = fds[0];
	session->kick = fds[1];
	session->events.take = fds[2];
	session->events.put = fds[3];
	session->alive = le32toh(welcome.alive);
	session->comp_vectors = le32toh(welcome.comp_vectors);
	session->addresses = le16toh(welcome.addresses);
	memcpy(session->mac, welcome.mac, sizeof(session->mac));
	return 0;
}

void vrdma_session_close(struct vrdma_session *session)
{
	/* A child that was made in an unlucky moment may have the socket: to close it is no end. */
	if (vrdma_file_is_ours(&session->own))
		shutdown(session->socket, SHUT_RDWR);
	else if (session->watched)
		/* Its wait has the last hold on the socket: that ends with it. */
		pthread_cancel(session->watcher);
	if (session->watched)
		pthread_join(session->watcher, NULL);
	vrdma_private_end(session);
	session_end(session);
	while (session->channels) {
		struct vrdma_channel *channel = session->channels;

		session->channels = channel->next;
		vrdma_events_end(session, &channel->events);
		free(channel);
	}
	while (session->sleepers) {
		struct vrdma_sleeper *sleeper = session->sleepers;

		session->sleepers = sleeper->next;
		free(sleeper);
	}
	while (session->pieces) {
		struct vrdma_piece *piece = session->pieces;

		session->pieces = piece->next;
		free(piece);
	}
	vrdma_events_end(session, &session->events);
	vrdma_loans_end(session);
	vrdma_dm_end(session->context);
	if (session->doorbells)
		munmap(session->doorbells, VRDMA_DB_LEN);
	free(session);
}

int vrdma_sleeper_add(struct vrdma_session *session, const struct ibv_cq *cq)
{
	struct vrdma_sleeper *sleeper = calloc(1, sizeof(*sleeper));

	if (!sleeper)
		return ENOMEM;
	sleeper->cq = cq;
	vrdma_tables_lock(session);
	sleeper->next = session->sleepers;
	session->sleepers = sleeper;
	vrdma_tables_unlock(session);
	return 0;
}

void vrdma_sleeper_drop(struct vrdma_session *session, const struct ibv_cq *cq)
{
	struct vrdma_sleeper **at, *gone;

	vrdma_tables_lock(session);
	for (at = &session->sleepers; *at && (*at)->cq != cq; at = &(*at)->next)
		;
	gone = *at;
	if (gone)
		*at = gone->next;
	vrdma_tables_unlock(session);
	free(gone);
}

/*
 * Whoever sleeps for completions finds those of all that was outstanding when he polls; behind them
 * a channel has its end, as that of a device whose driver is gone (uverbs_main.c,
 * ib_uverbs_comp_event_read: EIO).
 */
static void wake(struct vrdma_session *session)
{
	struct vrdma_channel *channel;
	struct vrdma_sleeper *sleeper;

	vrdma_tables_lock(session);
	for (channel = session->channels; channel; channel = channel->next) {
		for (sleeper = session->sleepers; sleeper; sleeper = sleeper->next) {
			__le64 cookie = htole64((uintptr_t)sleeper->cq);

			if (sleeper->cq->channel == channel->of)
				(void)!send(channel->events.put, &cookie, sizeof(cookie),
					    MSG_DONTWAIT | MSG_NOSIGNAL);
		}
		shutdown(channel->events.put, SHUT_WR);
	}
	vrdma_tables_unlock(session);
}

/* Everyone who waits is told: pollers by the status page, sleepers by an event. */
static void lost(struct vrdma_session *session)
{
	struct ib_uverbs_async_event_desc event = { .event_type = IBV_EVENT_DEVICE_FATAL };

	mmap(session->status_map, (size_t)sysconf(_SC_PAGESIZE), PROT_READ,
	     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (!vrdma_file_is_ours(&session->own))
		return;
	(void)!send(session->events.put, &event, sizeof(event), MSG_DONTWAIT | MSG_NOSIGNAL);
	wake(session);
}

static void *watch(void *arg)
{
	struct vrdma_session *session = arg;
	/* Answers are whoever's who asked; only the end is ours. */
	struct pollfd end = { .fd = session->socket, .events = POLLRDHUP };
	int before;

	/* In its wait alone it may be cancelled. */
	while (poll(&end, 1, -1) < 0 && errno == EINTR)
		;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	lost(session);
	return NULL;
}

int vrdma_watch(struct vrdma_session *session)
{
	sigset_t all, before;
	int ret;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	ret = pthread_create(&session->watcher, NULL, watch, session);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	session->watched = !ret;
	return ret;
}

struct command {
	__le64 cookie;
	__le32 channel;
	__le32 reserved;
	struct virtio_rdma_cmd_hdr hdr;
	uint8_t req[256];
};

int vrdma_command_making(struct ibv_context *context, uint16_t opcode, struct vrdma_made made,
			 const void *req, size_t req_len, void *resp, size_t resp_len)
{
	struct command command = {
		.cookie = htole64(made.cookie),
		.channel = htole32(made.channel),
		.hdr.opcode = htole16(opcode),
	};
	struct vrdma_request request = {
		VRDMA_COMMAND, &command, offsetof(struct command, req) + req_len, -1,
	};
	struct vrdma_answer answer = { resp, resp_len, NULL, 0 };

	if (req_len)
		memcpy(command.req, req, req_len);
	return vrdma_ask(vrdma_session_of(context), &request, &answer);
}

int vrdma_command(struct ibv_context *context, uint16_t opcode, const void *req, size_t req_len,
		  void *resp, size_t resp_len)
{
	struct vrdma_made none = {};

	return vrdma_command_making(context, opcode, none, req, req_len, resp, resp_len);
}

int vrdma_destroy(struct ibv_context *context, uint16_t opcode, uint32_t object)
{
	struct virtio_rdma_object_req req = { .object = htole32(object) };
	int ret = vrdma_command(context, opcode, &req, sizeof(req), NULL, 0);

	/* With the device everything that it had is gone. */
	return ret == EIO ? 0 : ret;
}
