// SPDX-License-Identifier: GPL-2.0
/*
 * Protection domains, and the two ways in which udata is read and written.
 *
 * A newer provider may send more than we know, an older one less room for the answer: what both know is exchanged.
 */
#include "virtio_rdma.h"

int vrdma_udata_in(struct ib_udata *udata, void *req, size_t len)
{
	if (!udata || udata->inlen < len)
		return -EINVAL;
	return ib_copy_from_udata(req, udata, len) ? -EFAULT : 0;
}

int vrdma_udata_out(struct ib_udata *udata, const void *resp, size_t len)
{
	if (!udata || !udata->outlen)
		return 0;
	return ib_copy_to_udata(udata, (void *)resp, min(len, udata->outlen)) ? -EFAULT : 0;
}

int vrdma_alloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibpd->device);
	struct vrdma_pd *pd = to_vpd(ibpd);
	struct virtio_rdma_object_resp resp;
	struct virtio_rdma_pd_resp uresp = {};
	bool done;
	int ret;

	pd->ctx = vrdma_ctx_of(vr, udata);
	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_PD_CREATE, pd->ctx->id, NULL, 0, &resp, sizeof(resp));
	if (ret)
		return ret;
	pd->pdn = le32_to_cpu(resp.object);
	uresp.pdn = pd->pdn;
	ret = vrdma_udata_out(udata, &uresp, sizeof(uresp));
	if (ret)
		vrdma_cmd_destroy(vr, VIRTIO_RDMA_CMD_PD_DESTROY, pd->ctx->id, pd->pdn, &done);
	return ret;
}

int vrdma_dealloc_pd(struct ib_pd *ibpd, struct ib_udata *udata)
{
	struct vrdma_pd *pd = to_vpd(ibpd);
	bool done;

	return vrdma_cmd_destroy(to_vr(ibpd->device), VIRTIO_RDMA_CMD_PD_DESTROY, pd->ctx->id, pd->pdn, &done);
}
