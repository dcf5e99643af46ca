// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * The device as libibverbs sees it: matching, contexts, protection and thread domains, the table of
 * operations.
 *
 * A device is found by the driver id of the kernel driver; the virtio modalias stands beside it for
 * kernels that report no driver id over netlink. Operations that this device lacks are left out,
 * libibverbs then answers EOPNOTSUPP by itself.
 */
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/rdma_user_ioctl_cmds.h>

#include <infiniband/cmd_ioctl.h>

#include "doorbell.h"
#include "virtio_rdma.h"

struct vrdma_get_context_cmd {
	struct ibv_get_context ibv_cmd;
	struct virtio_rdma_ucontext_req drv;
};
struct vrdma_get_context_rsp {
	struct ib_uverbs_get_context_resp ibv_resp;
	struct virtio_rdma_ucontext_resp drv;
};
static_assert(offsetof(struct vrdma_get_context_cmd, drv) == sizeof(struct ibv_get_context),
	      "padding");
static_assert(offsetof(struct vrdma_get_context_rsp, drv) ==
	      sizeof(struct ib_uverbs_get_context_resp), "padding");

static const struct verbs_match_ent vrdma_match_table[] = {
	VERBS_DRIVER_ID(VIRTIO_RDMA_DRIVER_ID),
	VERBS_MODALIAS_MATCH("virtio:d0000002Av*", NULL),	/* VIRTIO_RDMA_DEVICE_ID */
	{},
};

/* ---- Device and port ------------------------------------------------------------------------- */

static int vrdma_query_device_ex(struct ibv_context *context,
				 const struct ibv_query_device_ex_input *input,
				 struct ibv_device_attr_ex *attr, size_t attr_size)
{
	struct ib_uverbs_ex_query_device_resp resp;
	size_t resp_size = sizeof(resp);
	uint64_t fw;
	int ret;

	ret = ibv_cmd_query_device_any(context, input, attr, attr_size, &resp, &resp_size);
	if (ret)
		return ret;
	fw = resp.base.fw_ver;
	snprintf(attr->orig_attr.fw_ver, sizeof(attr->orig_attr.fw_ver), "%u.%u.%u",
		 (unsigned int)(fw >> 32 & 0xffff), (unsigned int)(fw >> 16 & 0xffff),
		 (unsigned int)(fw & 0xffff));
	return 0;
}

static int vrdma_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr)
{
	struct ibv_query_port cmd = {};

	return ibv_cmd_query_port(context, port, attr, &cmd, sizeof(cmd));
}

/* ---- Protection, thread and parent domains --------------------------------------------------- */

static struct ibv_pd *vrdma_alloc_pd(struct ibv_context *context)
{
	struct ib_uverbs_alloc_pd_resp rsp = {};
	struct ibv_alloc_pd cmd = {};
	struct vrdma_pd *pd;
	int ret;

	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	ret = ibv_cmd_alloc_pd(context, &pd->pd, &cmd, sizeof(cmd), &rsp, sizeof(rsp));
	if (ret) {
		free(pd);
		errno = ret;
		return NULL;
	}
	atomic_init(&pd->refcount, 0);
	return &pd->pd;
}

static int vrdma_dealloc_pd(struct ibv_pd *ibpd)
{
	struct vrdma_pd *pd = to_vpd(ibpd);
	int ret;

	if (atomic_load(&pd->refcount))
		return EBUSY;
	if (pd->contained) {
		atomic_fetch_sub(&pd->contained->refcount, 1);
		if (pd->td)
			atomic_fetch_sub(&pd->td->refcount, 1);
		free(pd);
		return 0;
	}
	ret = ibv_cmd_dealloc_pd(ibpd);
	if (!ret)
		free(pd);
	return ret;
}

/*
 * Objects of an imported context: the command fd is the same open file, so the handle is all it
 * takes. One that names nothing fails at its first use. The numbers of PDs are the kernel's
 * business, no work request carries one.
 */
static struct ibv_pd *vrdma_import_pd(struct ibv_context *context, uint32_t handle)
{
	struct vrdma_pd *pd;

	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	pd->pd.context = context;
	pd->pd.handle = handle;
	atomic_init(&pd->refcount, 0);
	return &pd->pd;
}

static void vrdma_unimport_pd(struct ibv_pd *ibpd)
{
	free(to_vpd(ibpd));
}

static struct ibv_td *vrdma_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	struct vrdma_td *td;

	if (attr->comp_mask) {
		errno = EINVAL;
		return NULL;
	}
	td = calloc(1, sizeof(*td));
	if (!td)
		return NULL;
	td->td.context = context;
	atomic_init(&td->refcount, 0);
	return &td->td;
}

static int vrdma_dealloc_td(struct ibv_td *ibtd)
{
	struct vrdma_td *td = to_vtd(ibtd);

	if (atomic_load(&td->refcount))
		return EBUSY;
	free(td);
	return 0;
}

static struct ibv_pd *vrdma_alloc_parent_domain(struct ibv_context *context,
						struct ibv_parent_domain_init_attr *attr)
{
	struct vrdma_pd *pd;

	if (ibv_check_alloc_parent_domain(attr))
		return NULL;
	if (!check_comp_mask(attr->comp_mask, IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS |
			     IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS &&
	    (!attr->alloc || !attr->free)) {
		errno = EINVAL;
		return NULL;
	}
	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	pd->contained = to_vpd(attr->pd);
	if (pd->contained->contained)
		pd->contained = pd->contained->contained;
	atomic_fetch_add(&pd->contained->refcount, 1);
	if (attr->td) {
		pd->td = to_vtd(attr->td);
		atomic_fetch_add(&pd->td->refcount, 1);
	}
	if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
		pd->alloc = attr->alloc;
		pd->free = attr->free;
	}
	if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
		pd->pd_context = attr->pd_context;
	atomic_init(&pd->refcount, 0);
	ibv_initialize_parent_domain(&pd->pd, &pd->contained->pd);
	return &pd->pd;
}

bool vrdma_pd_single_threaded(struct ibv_pd *pd)
{
	return to_vpd(pd)->td != NULL;
}

/* ---- Kick by system call --------------------------------------------------------------------- */

void vrdma_kick_ioctl(struct vrdma_context *ctx)
{
	struct ib_uverbs_ioctl_hdr hdr = {
		.length = sizeof(hdr),
		.object_id = VIRTIO_RDMA_OBJECT_KICK,
		.method_id = VIRTIO_RDMA_METHOD_KICK,
		.driver_id = VIRTIO_RDMA_DRIVER_ID,
	};
	int saved = errno;

	/*
	 * A failure means that the device is going away; the status page tells that to the next
	 * post or poll.
	 */
	(void)ioctl(ctx->vctx.context.cmd_fd, RDMA_VERBS_IOCTL, &hdr);
	errno = saved;
}

/* ---- Contexts -------------------------------------------------------------------------------- */

static const struct verbs_context_ops vrdma_base_ops = {
	.alloc_parent_domain = vrdma_alloc_parent_domain,
	.alloc_dm = vrdma_alloc_dm,
	.alloc_pd = vrdma_alloc_pd,
	.alloc_td = vrdma_alloc_td,
	.create_ah = vrdma_create_ah,
	.create_cq = vrdma_create_cq,
	.create_cq_ex = vrdma_create_cq_ex,
	.create_qp = vrdma_create_qp,
	.create_qp_ex = vrdma_create_qp_ex,
	.dealloc_pd = vrdma_dealloc_pd,
	.dealloc_td = vrdma_dealloc_td,
	.dereg_mr = vrdma_dereg_mr,
	.free_dm = vrdma_free_dm,
	.import_dm = vrdma_import_dm,
	.import_mr = vrdma_import_mr,
	.import_pd = vrdma_import_pd,
	.destroy_ah = vrdma_destroy_ah,
	.destroy_cq = vrdma_destroy_cq,
	.destroy_qp = vrdma_destroy_qp,
	.modify_qp = vrdma_modify_qp,
	.poll_cq = vrdma_poll_cq,
	.post_recv = vrdma_post_recv,
	.post_send = vrdma_post_send,
	.query_device_ex = vrdma_query_device_ex,
	.query_port = vrdma_query_port,
	.query_qp = vrdma_query_qp,
	.reg_dm_mr = vrdma_reg_dm_mr,
	.reg_dmabuf_mr = vrdma_reg_dmabuf_mr,
	.reg_mr = vrdma_reg_mr,
	.req_notify_cq = vrdma_arm_cq,
	.unimport_dm = vrdma_unimport_dm,
	.unimport_mr = vrdma_unimport_mr,
	.unimport_pd = vrdma_unimport_pd,
};

static const struct verbs_context_ops vrdma_srq_ops = {
	.create_srq = vrdma_create_srq,
	.create_srq_ex = vrdma_create_srq_ex,
	.destroy_srq = vrdma_destroy_srq,
	.modify_srq = vrdma_modify_srq,
	.post_srq_recv = vrdma_post_srq_recv,
	.query_srq = vrdma_query_srq,
};

static const struct verbs_context_ops vrdma_mw_ops = {
	.alloc_mw = vrdma_alloc_mw,
	.bind_mw = vrdma_bind_mw,
	.dealloc_mw = vrdma_dealloc_mw,
};

static const struct verbs_context_ops vrdma_mcast_ops = {
	.attach_mcast = ibv_cmd_attach_mcast,
	.detach_mcast = ibv_cmd_detach_mcast,
};

static const struct verbs_context_ops vrdma_resize_cq_ops = { .resize_cq = vrdma_resize_cq };
static const struct verbs_context_ops vrdma_modify_cq_ops = { .modify_cq = vrdma_modify_cq };
static const struct verbs_context_ops vrdma_rereg_ops = { .rereg_mr = vrdma_rereg_mr };
static void vrdma_free_context(struct ibv_context *context);
static const struct verbs_context_ops vrdma_free_ops = { .free_context = vrdma_free_context };

static const struct {
	uint64_t caps;
	const struct verbs_context_ops *ops;
} vrdma_optional_ops[] = {
	{ VIRTIO_RDMA_CAP_SRQ, &vrdma_srq_ops },
	{ VIRTIO_RDMA_CAP_MW_TYPE1 | VIRTIO_RDMA_CAP_MW_TYPE2, &vrdma_mw_ops },
	{ VIRTIO_RDMA_CAP_MCAST, &vrdma_mcast_ops },
	{ VIRTIO_RDMA_CAP_CQ_RESIZE, &vrdma_resize_cq_ops },
	{ VIRTIO_RDMA_CAP_CQ_MODERATE, &vrdma_modify_cq_ops },
	{ VIRTIO_RDMA_CAP_MR_REREG, &vrdma_rereg_ops },
};

static void vrdma_set_ops(struct vrdma_context *ctx)
{
	unsigned int i;

	verbs_set_ops(&ctx->vctx, &vrdma_base_ops);
	verbs_set_ops(&ctx->vctx, &vrdma_free_ops);
	for (i = 0; i < sizeof(vrdma_optional_ops) / sizeof(vrdma_optional_ops[0]); i++) {
		if (ctx->caps & vrdma_optional_ops[i].caps)
			verbs_set_ops(&ctx->vctx, vrdma_optional_ops[i].ops);
	}
}

static void vrdma_take_limits(struct vrdma_context *ctx,
			      const struct virtio_rdma_ucontext_resp *resp)
{
	ctx->alive = resp->alive;
	ctx->caps = resp->caps;
	ctx->kick_queue = resp->kick_queue;
	ctx->notify_offset = resp->notify_offset;
	ctx->max_inline = resp->max_inline;
	ctx->max_send_sge = resp->max_send_sge;
	ctx->max_recv_sge = resp->max_recv_sge;
	ctx->max_srq_sge = resp->max_srq_sge;
	ctx->max_qp_wr = resp->max_qp_wr;
	ctx->max_srq_wr = resp->max_srq_wr;
	ctx->max_cqe = resp->max_cqe;
}

static int vrdma_map_pages(struct vrdma_context *ctx, const struct virtio_rdma_ucontext_resp *resp)
{
	int fd = ctx->vctx.context.cmd_fd;
	void *map;

	map = mmap(NULL, ctx->page_size, PROT_READ, MAP_SHARED, fd, (off_t)resp->status_mmap);
	if (map == MAP_FAILED)
		return errno;
	ctx->status = map;
	if (resp->notify_mmap) {
		map = mmap(NULL, ctx->page_size, PROT_WRITE, MAP_SHARED, fd,
			   (off_t)resp->notify_mmap);
		if (map == MAP_FAILED)
			return errno;
		ctx->notify = map;
	}
	return vrdma_map_db_page(ctx, 0, resp->db_mmap) ? 0 : ENOMEM;
}

static void vrdma_unmap_pages(struct vrdma_context *ctx)
{
	unsigned int i;

	for (i = 0; i < ctx->num_db_pages; i++)
		munmap(ctx->db_pages[i].map, ctx->page_size);
	free(ctx->db_pages);
	if (ctx->notify)
		munmap(ctx->notify, ctx->page_size);
	if (ctx->status)
		munmap((void *)ctx->status, ctx->page_size);
	pthread_mutex_destroy(&ctx->db_mutex);
}

static void vrdma_free_context(struct ibv_context *context)
{
	struct vrdma_context *ctx = to_vctx(context);

	/* A process without a kernel driver has a thread here, which writes to the status page. */
	verbs_uninit_context(&ctx->vctx);
	vrdma_unmap_pages(ctx);
	free(ctx);
}

static struct vrdma_context *vrdma_new_context(struct ibv_device *device, int cmd_fd)
{
	struct vrdma_context *ctx;

	ctx = verbs_init_and_alloc_context(device, cmd_fd, ctx, vctx, VIRTIO_RDMA_DRIVER_ID);
	if (!ctx)
		return NULL;
	ctx->page_size = (size_t)sysconf(_SC_PAGESIZE);
	pthread_mutex_init(&ctx->db_mutex, NULL);
	return ctx;
}

static struct verbs_context *vrdma_open_context(struct vrdma_context *ctx, int ret,
						const struct virtio_rdma_ucontext_resp *resp)
{
	if (!ret) {
		vrdma_take_limits(ctx, resp);
		ret = vrdma_map_pages(ctx, resp);
	}
	if (ret) {
		vrdma_free_context(&ctx->vctx.context);
		errno = ret;
		return NULL;
	}
	vrdma_set_ops(ctx);
	return &ctx->vctx;
}

static struct verbs_context *vrdma_alloc_context(struct ibv_device *device, int cmd_fd,
						 void *private_data)
{
	struct vrdma_context *ctx = vrdma_new_context(device, cmd_fd);
	struct vrdma_get_context_cmd cmd = {};
	struct vrdma_get_context_rsp rsp = {};
	int ret;

	if (!ctx)
		return NULL;
	ret = ibv_cmd_get_context(&ctx->vctx, &cmd.ibv_cmd, sizeof(cmd), &rsp.ibv_resp,
				  sizeof(rsp));
	return vrdma_open_context(ctx, ret, &rsp.drv);
}

/*
 * The context of another opener of the same file, in this process or handed over by another: the
 * kernel tells what it told that one.
 */
static struct verbs_context *vrdma_import_context(struct ibv_device *device, int cmd_fd)
{
	struct vrdma_context *ctx = vrdma_new_context(device, cmd_fd);
	struct virtio_rdma_ucontext_resp resp = {};
	DECLARE_COMMAND_BUFFER_LINK(driver_attrs, UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT,
				    1, NULL);

	if (!ctx)
		return NULL;
	fill_attr_out_ptr(driver_attrs, VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, &resp);
	return vrdma_open_context(ctx, ibv_cmd_query_context(&ctx->vctx.context, driver_attrs),
				  &resp);
}

/* ---- Device ---------------------------------------------------------------------------------- */

static struct verbs_device *vrdma_alloc_device(struct verbs_sysfs_dev *sysfs_dev)
{
	return calloc(1, sizeof(struct verbs_device));
}

static void vrdma_uninit_device(struct verbs_device *device)
{
	free(device);
}

static const struct verbs_device_ops vrdma_device_ops = {
	.name = "virtio_rdma",
	.match_min_abi_version = VIRTIO_RDMA_UVERBS_ABI_VERSION,
	.match_max_abi_version = VIRTIO_RDMA_UVERBS_ABI_VERSION,
	.match_table = vrdma_match_table,
	.alloc_device = vrdma_alloc_device,
	.uninit_device = vrdma_uninit_device,
	.alloc_context = vrdma_alloc_context,
	.import_context = vrdma_import_context,
};
PROVIDER_DRIVER(virtio_rdma, vrdma_device_ops);
