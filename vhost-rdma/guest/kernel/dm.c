// SPDX-License-Identifier: GPL-2.0
/*
 * Device memory: memory that programs allocate from the device, reach by copies and register.
 *
 * The device is the host's CPU, and the memory nearest to it is the guest's. So this is memory of
 * the kernel, mapped into the process, bounded for each device as that of a card would be. A
 * program that was written for device memory runs; it is neither faster nor slower for it.
 * Whatever it registers is zero-based, by the rules of the verbs, so a device must know that.
 *
 * Mapping and regions hold references of their own to the pages.
 */
#define UVERBS_MODULE_NAME virtio_rdma
#include <rdma/uverbs_named_ioctl.h>
#include <linux/slab.h>
#include "virtio_rdma.h"

static void vrdma_dm_resp(const struct vrdma_dm *dm, struct virtio_rdma_dm_resp *resp)
{
	resp->mmap = rdma_user_mmap_get_offset(&dm->mmap->entry);
	resp->length = page_size(dm->page);
}

static void vrdma_dm_free(struct vrdma *vr, struct vrdma_dm *dm)
{
	if (!IS_ERR_OR_NULL(dm->mmap))
		rdma_user_mmap_entry_remove(&dm->mmap->entry);
	if (dm->page) {
		atomic_sub(compound_nr(dm->page), &vr->dm_pages);
		put_page(dm->page);
	}
	kfree(dm);
}

/* Pages in one run, within what is left of the device's share. */
static int vrdma_dm_take(struct vrdma *vr, struct vrdma_dm *dm, u64 length)
{
	unsigned int order = get_order(length);
	int pages = 1 << order;

	if (atomic_add_return(pages, &vr->dm_pages) <= VRDMA_DM_SIZE / PAGE_SIZE)
		dm->page = alloc_pages(GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_COMP | __GFP_NOWARN,
				       order);
	if (dm->page)
		return 0;
	atomic_sub(pages, &vr->dm_pages);
	return -ENOMEM;
}

struct ib_dm *vrdma_alloc_dm(struct ib_device *ib, struct ib_ucontext *ibuc,
			     struct ib_dm_alloc_attr *attr, struct uverbs_attr_bundle *attrs)
{
	struct virtio_rdma_dm_resp resp;
	struct vrdma *vr = to_vr(ib);
	struct vrdma_dm *dm;
	int ret;

	if (!attr->length || attr->length > VRDMA_DM_SIZE || attr->alignment > PAGE_SHIFT)
		return ERR_PTR(-EINVAL);
	dm = kzalloc(sizeof(*dm), GFP_KERNEL);
	if (!dm)
		return ERR_PTR(-ENOMEM);
	ret = vrdma_dm_take(vr, dm, attr->length);
	if (ret)
		goto err;
	dm->mmap = vrdma_mmap_insert(ibuc, VRDMA_MMAP_DM, dm->page, 0);
	ret = PTR_ERR_OR_ZERO(dm->mmap);
	if (ret)
		goto err;
	vrdma_dm_resp(dm, &resp);
	ret = uverbs_copy_to(attrs, VIRTIO_RDMA_ATTR_DM_ALLOC_RESP, &resp, sizeof(resp));
	if (ret)
		goto err;
	return &dm->ibdm;

err:
	vrdma_dm_free(vr, dm);
	return ERR_PTR(ret);
}

int vrdma_dealloc_dm(struct ib_dm *ibdm, struct uverbs_attr_bundle *attrs)
{
	vrdma_dm_free(to_vr(ibdm->device), to_vdm(ibdm));
	return 0;
}

/* A process that imports it is told what the one that allocated it was told. */
static int UVERBS_HANDLER(VIRTIO_RDMA_METHOD_DM_QUERY)(struct uverbs_attr_bundle *attrs)
{
	struct ib_dm *ibdm = uverbs_attr_get_obj(attrs, VIRTIO_RDMA_ATTR_DM_QUERY_HANDLE);
	struct virtio_rdma_dm_resp resp;

	if (IS_ERR(ibdm))
		return PTR_ERR(ibdm);
	vrdma_dm_resp(to_vdm(ibdm), &resp);
	return uverbs_copy_to(attrs, VIRTIO_RDMA_ATTR_DM_QUERY_RESP, &resp, sizeof(resp));
}

DECLARE_UVERBS_NAMED_METHOD(VIRTIO_RDMA_METHOD_DM_QUERY,
			    UVERBS_ATTR_IDR(VIRTIO_RDMA_ATTR_DM_QUERY_HANDLE, UVERBS_OBJECT_DM,
					    UVERBS_ACCESS_READ, UA_MANDATORY),
			    UVERBS_ATTR_PTR_OUT(VIRTIO_RDMA_ATTR_DM_QUERY_RESP,
						UVERBS_ATTR_STRUCT(struct virtio_rdma_dm_resp,
								   length),
						UA_MANDATORY));

ADD_UVERBS_METHODS(vrdma_dm_methods, UVERBS_OBJECT_DM,
		   &UVERBS_METHOD(VIRTIO_RDMA_METHOD_DM_QUERY));

ADD_UVERBS_ATTRIBUTES_SIMPLE(vrdma_dm_alloc, UVERBS_OBJECT_DM, UVERBS_METHOD_DM_ALLOC,
			     UVERBS_ATTR_PTR_OUT(VIRTIO_RDMA_ATTR_DM_ALLOC_RESP,
						 UVERBS_ATTR_STRUCT(struct virtio_rdma_dm_resp,
								    length),
						 UA_MANDATORY));

const struct uapi_definition vrdma_dm_defs[] = {
	UAPI_DEF_CHAIN_OBJ_TREE(UVERBS_OBJECT_DM, &vrdma_dm_methods),
	UAPI_DEF_CHAIN_OBJ_TREE(UVERBS_OBJECT_DM, &vrdma_dm_alloc),
	{},
};
