// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Devices that are sockets: `VHOST_RDMA_DEVICES` names one or several, separated by ':'; without it
 * every socket in /run/vhost-rdma/process is one, and every directory with a process.sock in it.
 * libibverbs lists them beside those of the kernel.
 *
 * Contexts, operations and domains are those of the guest's provider, whose source is included.
 */
#include "kernel.h"

#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cm.h"
#include "doorbell.h"
#include "session.h"

/* The guest's driver is not ours to register, and its kicks go another way. */
#undef PROVIDER_DRIVER
#define PROVIDER_DRIVER(name, ops)                                                                 \
	static const struct verbs_device_ops *vrdma_guests_ops(void)                               \
	{                                                                                          \
		return &(ops);                                                                     \
	}
void vrdma_kick_of_guest(struct vrdma_context *ctx);
#define vrdma_kick_ioctl vrdma_kick_of_guest
#include "virtio_rdma.c"
#undef vrdma_kick_ioctl

#define DIRECTORY "/run/vhost-rdma/process"
/* "vrmp": of devices without a kernel, so that no kernel's device is taken for one. */
#define LOCAL_DRIVER_ID 0x76726d70
/* Behind the kernel's indices, which count from 0. */
#define FIRST_INDEX 0x76720000

struct local_device {
	struct verbs_device device;
	char path[IBV_SYSFS_PATH_MAX];
	uint64_t guid;
	int index;
};

void vrdma_kick_ioctl(struct vrdma_context *ctx)
{
	struct vrdma_session *session = vrdma_session_of(&ctx->vctx.context);
	uint64_t one = 1;

	/* Not write(2) of the C library, a point of cancellation: the queue's lock is held. */
	if (session && vrdma_file_is_ours(&session->own))
		(void)!syscall(SYS_write, session->kick, &one, sizeof(one));
}

/* ---- Channels, addresses --------------------------------------------------------------------- */

/*
 * A thread may sleep in a channel that is destroyed: it sleeps on, as with the kernel, where its
 * read() holds the file. Here that is the other end, which closes when nobody reads any more.
 */
static bool is_read(const struct vrdma_channel *channel)
{
	struct pollfd peer = { .fd = channel->events.put };

	return poll(&peer, 1, 0) == 0;
}

/* Of channels that were destroyed, those that nobody sleeps in any more; `tables` is held. */
static void sweep(struct vrdma_session *session)
{
	struct vrdma_channel **at = &session->channels, *channel;

	if (!vrdma_file_is_ours(&session->own))
		return;
	while ((channel = *at)) {
		if (channel->of || is_read(channel)) {
			at = &channel->next;
			continue;
		}
		*at = channel->next;
		close(channel->events.put);
		vrdma_events_end(session, &channel->events);
		free(channel);
	}
}

static void remove_channel(struct vrdma_session *session, uint32_t number)
{
	__le32 which[2] = { htole32(number) };
	struct vrdma_request request = { VRDMA_CHANNEL_REMOVE, which, sizeof(which), -1 };
	struct vrdma_answer none = {};

	(void)vrdma_ask(session, &request, &none);
}

static int create_channel(struct ibv_comp_channel *of)
{
	struct vrdma_session *session = vrdma_session_of(of->context);
	struct vrdma_channel *channel = calloc(1, sizeof(*channel));
	struct vrdma_request request = { VRDMA_CHANNEL_ADD, NULL, 0, -1 };
	__le32 number[2] = {};
	int fds[2], ret;
	struct vrdma_answer answer = { number, sizeof(number), fds, 2 };

	if (!channel)
		return ENOMEM;
	ret = vrdma_ask(session, &request, &answer);
	if (ret) {
		/* The device has made one for which the program had no descriptors. */
		if (ret == EMFILE && number[0])
			remove_channel(session, le32toh(number[0]));
		free(channel);
		return ret;
	}
	channel->of = of;
	channel->number = le32toh(number[0]);
	channel->events.take = fds[0];
	channel->events.put = fds[1];
	of->fd = fds[0];
	vrdma_tables_lock(session);
	sweep(session);
	channel->next = session->channels;
	session->channels = channel;
	vrdma_tables_unlock(session);
	return 0;
}

static void destroy_channel(struct ibv_comp_channel *of)
{
	struct vrdma_session *session = vrdma_session_of(of->context);
	struct vrdma_channel *channel;
	uint32_t number = 0;

	close(of->fd);
	if (!session)
		return;
	vrdma_tables_lock(session);
	for (channel = session->channels; channel && channel->of != of; channel = channel->next)
		;
	if (channel) {
		number = channel->number;
		channel->of = NULL;
	}
	vrdma_tables_unlock(session);
	if (!channel)
		return;
	remove_channel(session, number);
	vrdma_tables_lock(session);
	sweep(session);
	vrdma_tables_unlock(session);
}

static int query_gid(struct ibv_context *context, uint32_t port, uint32_t index,
		     struct ibv_gid_entry *entry)
{
	struct vrdma_session *session = vrdma_session_of(context);
	__le32 which[2] = { htole32(index) };
	struct vrdma_request request = { VRDMA_ADDRESS, which, sizeof(which), -1 };
	struct vrdma_answer answer = { entry->gid.raw, sizeof(entry->gid.raw), NULL, 0 };

	if (port != 1)
		return EINVAL;
	entry->gid_index = index;
	entry->port_num = 1;
	entry->gid_type = IBV_GID_TYPE_ROCE_V2;
	return vrdma_ask(session, &request, &answer);
}

static int query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	*pkey = htobe16(0xffff);
	return port == 1 && index == 0 ? 0 : EINVAL;
}

static const struct verbs_local_ops local_ops = {
	.create_comp_channel = create_channel,
	.destroy_comp_channel = destroy_channel,
	.read_event = vrdma_read_event,
	.query_gid = query_gid,
	.query_pkey = query_pkey,
	.cm_open = vrdma_cm_open,
	.cm_close = vrdma_cm_close,
	.cm_command = vrdma_cm_command,
};

/* ---- Contexts -------------------------------------------------------------------------------- */

#undef verbs_uninit_context
void vrdma_local_uninit_context(struct verbs_context *vctx)
{
	struct vrdma_session *session = vrdma_session_of(&vctx->context);

	if (session)
		vrdma_session_close(session);
	/* Doorbell pages were the session's to unmap. A child of fork() has not got them. */
	container_of(vctx, struct vrdma_context, vctx)->num_db_pages = 0;
	verbs_uninit_context(vctx);
}

static void open_failed(struct vrdma_context *ctx, struct vrdma_session *session, int ret)
{
	if (session)
		free(session);
	pthread_mutex_destroy(&ctx->db_mutex);
	verbs_uninit_context(&ctx->vctx);
	free(ctx);
	errno = ret;
}

/* The GUID is the MAC address's (RFC 4291, appendix A), as the device itself says. */
static uint64_t guid_of(const struct vrdma_session *session)
{
	const uint8_t *m = session->mac;
	const uint8_t bytes[8] = { m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5] };
	uint64_t guid = 0;
	int i;

	for (i = 0; i < 8; i++)
		guid = guid << 8 | bytes[i];
	return guid;
}

/* A session without a context, which would have closed what this does. */
static void discard(struct vrdma_session *session)
{
	close(session->status);
	close(session->events.take);
	vrdma_session_close(session);
}

static struct verbs_context *open_socket(struct ibv_device *device, int cmd_fd, void *private_data)
{
	struct local_device *local = container_of(device, struct local_device, device.device);
	struct vrdma_get_context_cmd cmd = {};
	struct vrdma_get_context_rsp rsp = {};
	struct vrdma_session *session;
	struct vrdma_context *ctx;
	struct verbs_context *vctx;
	int ret;

	ctx = vrdma_new_context(device, -1);
	if (!ctx)
		return NULL;
	session = calloc(1, sizeof(*session));
	if (session)
		session->index = local->index;
	ret = session ? vrdma_session_open(session, local->path, &ctx->vctx.context) : ENOMEM;
	if (ret) {
		open_failed(ctx, session, ret);
		return NULL;
	}
	/* The path may be another NIC's by now. */
	if (guid_of(session) != local->guid) {
		discard(session);
		open_failed(ctx, NULL, ENODEV);
		return NULL;
	}
	/* What the guest's provider maps is the status page. Both are closed with the context. */
	ctx->vctx.context.cmd_fd = session->status;
	ctx->vctx.context.async_fd = session->events.take;
	ret = ibv_cmd_get_context(&ctx->vctx, &cmd.ibv_cmd, sizeof(cmd), &rsp.ibv_resp,
				  sizeof(rsp));
	vctx = vrdma_open_context(ctx, ret, &rsp.drv);
	if (!vctx)
		return NULL;
	session->status_map = (void *)ctx->status;
	verbs_set_local_ops(vctx, &local_ops);
	if (vrdma_watch(session)) {
		vrdma_free_context(&vctx->context);
		errno = EAGAIN;
		return NULL;
	}
	return vctx;
}

/* ---- Devices --------------------------------------------------------------------------------- */

static const struct verbs_match_ent local_match_table[] = {
	VERBS_DRIVER_ID(LOCAL_DRIVER_ID),
	{},
};

static struct verbs_device *alloc_device(struct verbs_sysfs_dev *found)
{
	struct local_device *local = calloc(1, sizeof(*local));

	if (!local)
		return NULL;
	snprintf(local->path, sizeof(local->path), "%s", found->ibdev_path);
	local->guid = found->node_guid;
	local->index = found->ibdev_idx;
	return &local->device;
}

static void uninit_device(struct verbs_device *device)
{
	free(container_of(device, struct local_device, device));
}

static int look(const char *path, uint64_t *guid)
{
	struct vrdma_session *session = calloc(1, sizeof(*session));
	int ret;

	if (!session)
		return ENOMEM;
	ret = vrdma_session_open(session, path, NULL);
	if (ret) {
		free(session);
		return ret;
	}
	*guid = guid_of(session);
	discard(session);
	return 0;
}

/*
 * A socket that was named, and its number. libibverbs takes two devices with the same name and
 * index for the same one, whenever it was listed: so a number is never another socket's, and one
 * that is listed again has the number that it had. A device that was lost is another by its index,
 * as one that a kernel's driver has registered anew: whoever keeps contexts (librdmacm does) finds
 * that his is of none that there is any more. The same holds for a child of fork(), which has lost
 * what its parent had.
 */
struct named {
	struct named *next;
	char path[IBV_SYSFS_PATH_MAX];
	dev_t dev;
	ino_t ino;
	uint64_t guid;
	int number;
	int index;
	bool given;	/* a device had the number; before that, whoever comes to the path has it */
	bool listed;	/* in the listing under way, or the last */
};

/* Of those that are not listed any more, so many are remembered, at most. */
#define REMEMBERED 256

/* In order of their numbers. libibverbs lists devices in one thread at a time. */
static struct named *all_named;
static int next_number;
static int next_index = FIRST_INDEX;

/* File systems give the number of a file that is gone to another: the NIC is compared as well. */
static bool is_same(const struct named *named, const struct stat *st, const uint64_t *guid)
{
	return named->dev == st->st_dev && named->ino == st->st_ino &&
	       (!guid || named->guid == *guid);
}

/* `guid` is NULL where nobody is there. */
static struct named *name(const char *path, const uint64_t *guid)
{
	struct named **at, *named;
	struct stat st = {};

	(void)stat(path, &st);
	for (at = &all_named; (named = *at); at = &named->next) {
		/* One that is named twice is two devices. */
		if (!named->listed && !strcmp(named->path, path) &&
		    (!named->given || is_same(named, &st, guid)))
			break;
	}
	if (!named) {
		named = calloc(1, sizeof(*named));
		if (!named)
			return NULL;
		snprintf(named->path, sizeof(named->path), "%s", path);
		named->number = next_number++;
		named->index = next_index++;
		*at = named;
	} else if (vrdma_session_is_lost(named->index)) {
		named->index = next_index++;
	}
	named->dev = st.st_dev;
	named->ino = st.st_ino;
	if (guid) {
		named->guid = *guid;
		named->given = true;
	}
	named->listed = true;
	return named;
}

static void forget_names(void)
{
	struct named **at = &all_named, *named;
	int many = -REMEMBERED;

	for (named = all_named; named; named = named->next)
		many += !named->listed;
	while (many > 0 && (named = *at)) {
		if (named->listed) {
			at = &named->next;
			continue;
		}
		*at = named->next;
		free(named);
		many--;
	}
}

static void begin_names(void)
{
	struct named *named;

	for (named = all_named; named; named = named->next)
		named->listed = false;
}

/*
 * A device that this process has open is there, and has no need to be asked: it may have no room
 * for one session more.
 */
static bool is_open(const char *path, uint64_t *guid)
{
	const struct named *named;
	struct stat st;

	if (stat(path, &st))
		return false;
	for (named = all_named; named; named = named->next) {
		if (!named->listed && named->given && !strcmp(named->path, path) &&
		    is_same(named, &st, NULL) && vrdma_session_is_live(named->index)) {
			*guid = named->guid;
			return true;
		}
	}
	return false;
}

static void add(struct list_head *list, const char *path)
{
	struct verbs_sysfs_dev *found = calloc(1, sizeof(*found));
	const struct named *named;
	bool there;

	if (!found)
		return;
	there = is_open(path, &found->node_guid) || !look(path, &found->node_guid);
	named = name(path, there ? &found->node_guid : NULL);
	if (!there && getenv("IBV_SHOW_WARNINGS"))
		fprintf(stderr, "libibverbs: Warning: %s is no socket of vhost-rdma, "
				"or nobody is there\n", path);
	if (!there || !named) {
		free(found);
		return;
	}
	found->flags = VSYSFS_LOCAL | VSYSFS_READ_NODE_GUID;
	found->driver_id = LOCAL_DRIVER_ID;
	found->node_type = IBV_NODE_CA;
	found->ibdev_idx = named->index;
	found->num_ports = 1;
	found->abi_ver = VIRTIO_RDMA_UVERBS_ABI_VERSION;
	snprintf(found->ibdev_path, sizeof(found->ibdev_path), "%s", path);
	snprintf(found->ibdev_name, sizeof(found->ibdev_name), "vhost_rdma%d", named->number);
	snprintf(found->sysfs_name, sizeof(found->sysfs_name), "vhost_rdma%d", named->number);
	list_add_tail(list, &found->entry);
}

static int is_socket(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

/* An entry is a socket, or a NIC's directory with one in it, as a pod gets it. */
static void path_of(const char *entry, char *path, size_t size)
{
	struct stat st;

	snprintf(path, size, DIRECTORY "/%s", entry);
	if (!stat(path, &st) && S_ISDIR(st.st_mode))
		snprintf(path, size, DIRECTORY "/%s/process.sock", entry);
}

static void find_named(struct list_head *list, const char *paths)
{
	char *all, *rest, *one;

	rest = all = strdup(paths);
	while (all && (one = strsep(&rest, ":")))
		add(list, one);
	free(all);
}

static void find_in_directory(struct list_head *list)
{
	struct dirent **entries;
	char path[512];
	int count, i;

	count = scandir(DIRECTORY, &entries, is_socket, alphasort);
	for (i = 0; i < count; i++) {
		path_of(entries[i]->d_name, path, sizeof(path));
		add(list, path);
		free(entries[i]);
	}
	if (count >= 0)
		free(entries);
}

static int find_devices(struct list_head *list)
{
	const char *named = getenv("VHOST_RDMA_DEVICES");

	begin_names();
	if (named && *named)
		find_named(list, named);
	else
		find_in_directory(list);
	forget_names();
	return 0;
}

static const struct verbs_device_ops local_device_ops = {
	.name = "vhost_rdma",
	.match_min_abi_version = VIRTIO_RDMA_UVERBS_ABI_VERSION,
	.match_max_abi_version = VIRTIO_RDMA_UVERBS_ABI_VERSION,
	.match_table = local_match_table,
	.alloc_device = alloc_device,
	.uninit_device = uninit_device,
	.alloc_context = open_socket,
};

__attribute__((constructor)) static void register_local(void)
{
	(void)vrdma_guests_ops;
	verbs_register_local_driver(&local_device_ops, find_devices);
}
