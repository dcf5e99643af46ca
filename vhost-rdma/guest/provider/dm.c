// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Device memory: the kernel driver's pages, mapped here and hidden behind copies. As on a card it
 * is reached in words of four bytes, so that a program which works here works there.
 */
#include <sys/mman.h>

#include <rdma/ib_user_ioctl_cmds.h>

#include <infiniband/cmd_ioctl.h>

#include "virtio_rdma.h"

struct vrdma_dm {
	struct verbs_dm vdm;
	uint8_t *map;
	uint64_t length;	/* as it was asked for */
	uint64_t mapped;
};

static struct vrdma_dm *to_vdm(struct ibv_dm *dm)
{
	return container_of(dm, struct vrdma_dm, vdm.dm);
}

static bool dm_has(const struct vrdma_dm *dm, uint64_t offset, size_t length)
{
	return !((offset | length) & 3) && offset <= dm->length && length <= dm->length - offset;
}

static int memcpy_to_dm(struct ibv_dm *ibdm, uint64_t offset, const void *from, size_t length)
{
	struct vrdma_dm *dm = to_vdm(ibdm);

	if (!dm_has(dm, offset, length))
		return EFAULT;
	memcpy(dm->map + offset, from, length);
	return 0;
}

static int memcpy_from_dm(void *to, struct ibv_dm *ibdm, uint64_t offset, size_t length)
{
	struct vrdma_dm *dm = to_vdm(ibdm);

	if (!dm_has(dm, offset, length))
		return EFAULT;
	memcpy(to, dm->map + offset, length);
	return 0;
}

static int dm_map(struct vrdma_dm *dm, struct ibv_context *context,
		  const struct virtio_rdma_dm_resp *resp)
{
	void *map = mmap(NULL, resp->length, PROT_READ | PROT_WRITE, MAP_SHARED, context->cmd_fd,
			 (off_t)resp->mmap);

	if (map == MAP_FAILED)
		return errno;
	dm->map = map;
	dm->mapped = resp->length;
	dm->vdm.dm.memcpy_to_dm = memcpy_to_dm;
	dm->vdm.dm.memcpy_from_dm = memcpy_from_dm;
	return 0;
}

struct ibv_dm *vrdma_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
	DECLARE_COMMAND_BUFFER(cmdb, UVERBS_OBJECT_DM, UVERBS_METHOD_DM_ALLOC, 1);
	struct virtio_rdma_dm_resp resp = {};
	struct vrdma_dm *dm;
	int ret;

	if (attr->comp_mask) {
		errno = EINVAL;
		return NULL;
	}
	dm = calloc(1, sizeof(*dm));
	if (!dm)
		return NULL;
	dm->length = attr->length;
	fill_attr_out_ptr(cmdb, VIRTIO_RDMA_ATTR_DM_ALLOC_RESP, &resp);
	ret = ibv_cmd_alloc_dm(context, attr, &dm->vdm, cmdb);
	if (ret)
		goto err;
	ret = dm_map(dm, context, &resp);
	if (ret) {
		ibv_cmd_free_dm(&dm->vdm);
		goto err;
	}
	return &dm->vdm.dm;

err:
	free(dm);
	errno = ret;
	return NULL;
}

int vrdma_free_dm(struct ibv_dm *ibdm)
{
	struct vrdma_dm *dm = to_vdm(ibdm);
	int ret = ibv_cmd_free_dm(&dm->vdm);

	if (ret)
		return ret;
	munmap(dm->map, dm->mapped);
	free(dm);
	return 0;
}

/* How much of the pages was asked for is not known here: all of them can be reached. */
struct ibv_dm *vrdma_import_dm(struct ibv_context *context, uint32_t handle)
{
	DECLARE_COMMAND_BUFFER(cmdb, UVERBS_OBJECT_DM, VIRTIO_RDMA_METHOD_DM_QUERY, 2);
	struct virtio_rdma_dm_resp resp = {};
	struct vrdma_dm *dm;
	int ret;

	dm = calloc(1, sizeof(*dm));
	if (!dm)
		return NULL;
	fill_attr_in_obj(cmdb, VIRTIO_RDMA_ATTR_DM_QUERY_HANDLE, handle);
	fill_attr_out_ptr(cmdb, VIRTIO_RDMA_ATTR_DM_QUERY_RESP, &resp);
	ret = execute_ioctl(context, cmdb) ? errno : dm_map(dm, context, &resp);
	if (ret) {
		free(dm);
		errno = ret;
		return NULL;
	}
	dm->length = resp.length;
	dm->vdm.handle = handle;
	dm->vdm.dm.handle = handle;
	dm->vdm.dm.context = context;
	return &dm->vdm.dm;
}

void vrdma_unimport_dm(struct ibv_dm *ibdm)
{
	struct vrdma_dm *dm = to_vdm(ibdm);

	munmap(dm->map, dm->mapped);
	free(dm);
}

struct ibv_mr *vrdma_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *ibdm, uint64_t offset,
			       size_t length, unsigned int access)
{
	struct verbs_mr *vmr = calloc(1, sizeof(*vmr));
	int ret;

	if (!vmr)
		return NULL;
	ret = ibv_cmd_reg_dm_mr(pd, &to_vdm(ibdm)->vdm, offset, length, access, vmr, NULL);
	if (ret) {
		free(vmr);
		errno = ret;
		return NULL;
	}
	return &vmr->ibv_mr;
}
