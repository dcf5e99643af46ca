// SPDX-License-Identifier: GPL-2.0
/*
 * Protection domains.
 */
#include "virtio_rdma.h"

int vrdma_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_pd *pd = to_vpd(ibpd);
	struct virtio_rdma_object_resp resp;
	struct virtio_rdma_pd_resp uresp = {};
	int ret;

	if (udata) {
		ret = ib_is_udata_in_empty(udata);
		if (ret)
			return ret;
	}
	pd->ctx = vrdma_ctx_of(vr, udata);
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_PD_CREATE, pd->ctx->id, NULL, 0, &resp, sizeof(resp));
	if (ret)
		return ret;
	pd->pdn = le32_to_cpu(resp.object);
	uresp.pdn = pd->pdn;
	if (udata)
		ret = ib_respond_udata(udata, uresp);
	if (ret)
		vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_PD_DESTROY, pd->ctx->id, pd->pdn);
	return ret;
}

int vrdma_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_pd *pd = to_vpd(ibpd);

	vrdma_ah_wait_idle(vr, pd);
	vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_PD_DESTROY, pd->ctx->id, pd->pdn);
	return 0;
}
