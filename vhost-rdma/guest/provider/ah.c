// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Address handles: made by the device (a permission is checked there), named by number in a work
 * request.
 */
#include "virtio_rdma.h"

struct vrdma_create_ah_rsp {
	struct ib_uverbs_create_ah_resp ibv_resp;
	struct virtio_rdma_ah_resp drv;
};
static_assert(offsetof(struct vrdma_create_ah_rsp, drv) == sizeof(struct ib_uverbs_create_ah_resp),
	      "padding");

struct ibv_ah *vrdma_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct vrdma_create_ah_rsp rsp = {};
	struct vrdma_ah *ah;
	int ret;

	/* RoCE addresses are GIDs: without a GRH there is none. */
	if (!attr->is_global) {
		errno = EINVAL;
		return NULL;
	}
	ah = calloc(1, sizeof(*ah));
	if (!ah)
		return NULL;
	ret = ibv_cmd_create_ah(pd, &ah->ah, attr, &rsp.ibv_resp, sizeof(rsp));
	if (ret) {
		free(ah);
		errno = ret;
		return NULL;
	}
	ah->ahn = rsp.drv.ahn;
	return &ah->ah;
}

int vrdma_destroy_ah(struct ibv_ah *ibah)
{
	int ret = ibv_cmd_destroy_ah(ibah);

	if (!ret)
		free(to_vah(ibah));
	return ret;
}
