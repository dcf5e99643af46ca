// SPDX-License-Identifier: GPL-2.0
/*
 * User contexts: what a process maps, and how it kicks.
 *
 * A process sees the status page (read-only), doorbell pages of its own, and, where every queue
 * has a notify page of its own, that of its kick queue; else it kicks by an ioctl method. None
 * survives fork(), because two processes must not produce into one ring.
 *
 * All are mapped by page frame number and not by vm_insert_page(), also the pages that are RAM:
 * the verbs core tracks mappings only if rdma_user_mmap_io() made them, and only those does it
 * replace by zeroes when the device goes away under a process. A process that stored to a
 * doorbell page of a dead context would harm nobody, since the page lives as long as its entry,
 * but one that polled ALIVE in the status page must see it change.
 */
#define UVERBS_MODULE_NAME virtio_rdma
#include <rdma/uverbs_named_ioctl.h>
#include <linux/slab.h>
#include "virtio_rdma.h"

static inline struct vrdma_mmap *to_vmmap(struct rdma_user_mmap_entry *entry)
{
	return container_of(entry, struct vrdma_mmap, entry);
}

/*
 * The page may be NULL (notify). The entry holds a reference of its own to it: a mapping can
 * outlive the context.
 */
struct vrdma_mmap *vrdma_mmap_insert(struct ib_ucontext *ibuc, enum vrdma_mmap_kind kind,
				     struct page *page, unsigned long pfn)
{
	struct vrdma_mmap *m = kzalloc(sizeof(*m), GFP_KERNEL);
	int ret;

	if (!m)
		return ERR_PTR(-ENOMEM);
	m->kind = kind;
	m->page = page;
	m->pfn = page ? page_to_pfn(page) : pfn;
	/* Offset 0 is left out: it means "none" to the provider. */
	ret = rdma_user_mmap_entry_insert_range(ibuc, &m->entry,
						page ? page_size(page) : PAGE_SIZE, 1, U32_MAX);
	if (ret) {
		kfree(m);
		return ERR_PTR(ret);
	}
	if (page)
		get_page(page);
	return m;
}

void vrdma_mmap_free(struct rdma_user_mmap_entry *entry)
{
	struct vrdma_mmap *m = to_vmmap(entry);

	if (m->page)
		put_page(m->page);
	kfree(m);
}

int vrdma_mmap_op(struct ib_ucontext *ibuc, struct vm_area_struct *vma)
{
	struct rdma_user_mmap_entry *entry;
	struct vrdma_mmap *m;
	pgprot_t prot;
	int ret = -EPERM;

	entry = rdma_user_mmap_entry_get(ibuc, vma);
	if (!entry)
		return -EINVAL;
	m = to_vmmap(entry);
	if (vma->vm_flags & VM_EXEC)
		goto out;
	if (m->kind == VRDMA_MMAP_STATUS) {
		if (vma->vm_flags & VM_WRITE)
			goto out;
		vrdma_vm_flags_mod(vma, 0, VM_MAYWRITE);
	}
	vrdma_vm_flags_mod(vma, VM_DONTCOPY | VM_DONTEXPAND, VM_MAYEXEC);
	prot = vma->vm_page_prot;
	if (m->kind == VRDMA_MMAP_NOTIFY)
		prot = pgprot_noncached(prot);
	ret = rdma_user_mmap_io(ibuc, vma, m->pfn, entry->npages << PAGE_SHIFT, prot, entry);
out:
	rdma_user_mmap_entry_put(entry);
	return ret;
}

/*
 * The core takes the mappings away itself; that the operation exists allows the removal of a device
 * in use.
 */
void vrdma_disassociate_ucontext(struct ib_ucontext *ibuc)
{
}

static void vrdma_remove_mmaps(struct vrdma_ucontext *uc)
{
	u32 i;

	for (i = 0; i < uc->ctx.npages; i++)
		if (uc->ctx.pages[i].mmap)
			rdma_user_mmap_entry_remove(&uc->ctx.pages[i].mmap->entry);
	if (uc->notify)
		rdma_user_mmap_entry_remove(&uc->notify->entry);
	if (uc->status)
		rdma_user_mmap_entry_remove(&uc->status->entry);
}

static int vrdma_context_create(struct vrdma *vr, struct vrdma_ucontext *uc, struct vrdma_mem *mem)
{
	struct virtio_rdma_context_create_req req = {
		.db_page = cpu_to_le64(mem->dma[0]),
	};
	struct virtio_rdma_context_create_resp resp;
	int ret;

	ret = vrdma_cmd(vr, VIRTIO_RDMA_CMD_CONTEXT_CREATE, 0, &req, sizeof(req), &resp,
			sizeof(resp));
	if (ret) {
		vrdma_mem_put(vr, mem, !vrdma_is_lost(vr));
		return ret;
	}
	uc->ctx.id = le32_to_cpu(resp.ctx);
	uc->ctx.kick_queue = le32_to_cpu(resp.kick_queue);
	ret = vrdma_ctx_append_page(&uc->ctx, mem, NULL);
	if (ret || uc->ctx.kick_queue >= vr->num_vqs) {
		vrdma_cmd_destroy_context(vr, uc->ctx.id);
		if (ret)
			vrdma_mem_put(vr, mem, !vrdma_is_lost(vr));
		return ret ? ret : -EIO;
	}
	return 0;
}

static int vrdma_context_mmaps(struct vrdma *vr, struct vrdma_ucontext *uc)
{
	struct ib_ucontext *ibuc = &uc->ibucontext;
	struct vrdma_mmap *m;
	u64 phys = vr->notify_phys ? vr->notify_phys[uc->ctx.kick_queue] : 0;

	m = vrdma_mmap_insert(ibuc, VRDMA_MMAP_STATUS, vr->status_page->page, 0);
	if (IS_ERR(m))
		return PTR_ERR(m);
	uc->status = m;
	m = vrdma_mmap_insert(ibuc, VRDMA_MMAP_DOORBELL, uc->ctx.pages[0].mem->page, 0);
	if (IS_ERR(m))
		return PTR_ERR(m);
	uc->ctx.pages[0].mmap = m;
	if (phys) {
		m = vrdma_mmap_insert(ibuc, VRDMA_MMAP_NOTIFY, NULL, phys >> PAGE_SHIFT);
		if (IS_ERR(m))
			return PTR_ERR(m);
		uc->notify = m;
	}
	return 0;
}

/*
 * What the provider is told, once when the context is made and once more by each process that
 * imports it.
 */
static void vrdma_context_resp(struct vrdma *vr, struct vrdma_ucontext *uc,
			       struct virtio_rdma_ucontext_resp *resp)
{
	if (uc->notify) {
		resp->notify_mmap = rdma_user_mmap_get_offset(&uc->notify->entry);
		resp->notify_offset = offset_in_page(vr->notify_phys[uc->ctx.kick_queue]);
	}
	resp->status_mmap = rdma_user_mmap_get_offset(&uc->status->entry);
	resp->db_mmap = rdma_user_mmap_get_offset(&uc->ctx.pages[0].mmap->entry);
	resp->caps = vr->caps;
	resp->kick_queue = uc->ctx.kick_queue;
	resp->alive = lower_32_bits(vr->nonce);
	resp->max_inline = vrdma_attr32(vr->attr.max_inline);
	resp->max_send_sge = vrdma_attr32(vr->attr.max_send_sge);
	resp->max_recv_sge = vrdma_attr32(vr->attr.max_recv_sge);
	resp->max_srq_sge = vrdma_attr32(vr->attr.max_srq_sge);
	resp->max_qp_wr = vrdma_attr32(vr->attr.max_qp_wr);
	resp->max_srq_wr = vrdma_attr32(vr->attr.max_srq_wr);
	resp->max_cqe = vrdma_attr32(vr->attr.max_cqe);
}

static void vrdma_context_destroy(struct vrdma *vr, struct vrdma_ucontext *uc)
{
	bool done;

	vrdma_remove_mmaps(uc);
	done = vrdma_cmd_destroy_context(vr, uc->ctx.id);
	vrdma_ctx_drop_pages(&uc->ctx, done);
}

int vrdma_alloc_ucontext(struct ib_ucontext *ibuc, struct ib_udata *udata)
{
	struct vrdma *vr = to_vr(ibuc->device);
	struct vrdma_ucontext *uc = to_vuc(ibuc);
	struct virtio_rdma_ucontext_resp resp = {};
	struct vrdma_mem *mem;
	int ret;

	/* All of struct virtio_rdma_ucontext_req is reserved. */
	ret = ib_is_udata_in_empty(udata);
	if (ret)
		return ret;
	vrdma_ctx_init(vr, &uc->ctx);
	mem = vrdma_mem_page(vr);
	if (IS_ERR(mem))
		return PTR_ERR(mem);
	ret = vrdma_context_create(vr, uc, mem);
	if (ret)
		goto err_pages;
	ret = vrdma_context_mmaps(vr, uc);
	if (ret)
		goto err_context;
	vrdma_context_resp(vr, uc, &resp);
	ret = ib_respond_udata(udata, resp);
	if (ret)
		goto err_context;
	vrdma_keepalive_while_used(vr);
	return 0;

err_context:
	vrdma_context_destroy(vr, uc);
	return ret;
err_pages:
	vrdma_ctx_drop_pages(&uc->ctx, !vrdma_is_lost(vr));
	return ret;
}

void vrdma_dealloc_ucontext(struct ib_ucontext *ibuc)
{
	struct vrdma *vr = to_vr(ibuc->device);

	vrdma_context_destroy(vr, to_vuc(ibuc));
	vrdma_unused(vr);
}

/* ---- Import of a context: the answer of alloc_ucontext again ---- */

int vrdma_query_ucontext(struct ib_ucontext *ibuc, struct uverbs_attr_bundle *attrs)
{
	struct virtio_rdma_ucontext_resp resp = {};
	struct vrdma_ucontext *uc = to_vuc(ibuc);

	/* Its pages may become more meanwhile, and their array another one. */
	mutex_lock(&uc->ctx.lock);
	vrdma_context_resp(to_vr(ibuc->device), uc, &resp);
	mutex_unlock(&uc->ctx.lock);
	return uverbs_copy_to_struct_or_zero(attrs, VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, &resp,
					     sizeof(resp));
}

#define VRDMA_RESP	UVERBS_ATTR_STRUCT(struct virtio_rdma_ucontext_resp, reserved)
ADD_UVERBS_ATTRIBUTES_SIMPLE(vrdma_query_context, UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT,
			     UVERBS_ATTR_PTR_OUT(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, VRDMA_RESP,
						 UA_MANDATORY));

/* ---- The kick method (virtio_rdma_uapi.h) ---- */

static int UVERBS_HANDLER(VIRTIO_RDMA_METHOD_KICK)(struct uverbs_attr_bundle *attrs)
{
	struct ib_ucontext *ibuc = ib_uverbs_get_ucontext(attrs);
	struct vrdma_ucontext *uc;

	if (IS_ERR(ibuc))
		return PTR_ERR(ibuc);
	uc = to_vuc(ibuc);
	vrdma_kick(uc->ctx.vr, uc->ctx.kick_queue);
	return 0;
}

DECLARE_UVERBS_NAMED_METHOD(VIRTIO_RDMA_METHOD_KICK);

DECLARE_UVERBS_GLOBAL_METHODS(VIRTIO_RDMA_OBJECT_KICK, &UVERBS_METHOD(VIRTIO_RDMA_METHOD_KICK));

const struct uapi_definition vrdma_uapi_defs[] = {
	UAPI_DEF_CHAIN_OBJ_TREE(UVERBS_OBJECT_DEVICE, &vrdma_query_context),
	UAPI_DEF_CHAIN_OBJ_TREE_NAMED(VIRTIO_RDMA_OBJECT_KICK),
	UAPI_DEF_CHAIN(vrdma_dm_defs),
	{},
};
