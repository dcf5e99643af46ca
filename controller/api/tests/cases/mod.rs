//! What the definitions take and what they refuse: one table, for the evaluator of CEL that the
//! tests of the definitions have, and for a real server (`examples/defined.rs`).
//!
//! A case is one request: an object is made, or one that is there is replaced. What is refused is
//! refused with the words that a user reads, a rule's message or what the server makes of a schema.

use serde_json::{Value, json};

/// One request and what must come of it.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// What it shows.
    pub(crate) name: &'static str,
    /// The kind.
    pub(crate) kind: &'static str,
    /// The object's name.
    pub(crate) object: String,
    /// What is there before: the `spec`. Absent: the object is made.
    pub(crate) before: Option<Value>,
    /// The `spec` of the request.
    pub(crate) spec: Value,
    /// Absent: it is taken. Otherwise what the refusal says.
    pub(crate) refused: Option<&'static str>,
}

impl Case {
    /// The whole object with this `spec`.
    #[must_use]
    pub(crate) fn whole(&self, spec: &Value) -> Value {
        json!({
            "apiVersion": "vhost-rdma.io/v1alpha1", "kind": self.kind,
            "metadata": {"name": self.object}, "spec": spec,
        })
    }
}

const BACKING: &str = "exactly one of soft and rnic says what carries the network";
const CARRIER: &str = "what carries a network cannot be changed: make a new one";
const FABRIC: &str = "fabric and addressing of a network cannot be changed: make a new one";
const VNI: &str = "the vni of a network cannot be changed: make a new one";
const BLOCKS: &str = "the blockSize of a network cannot be changed: make a new one";
const NAME: &str = "a network's name has at most 40 characters and no dot";
const BOUND: &str = "a block is bound once";
const RELEASING: &str = "a block that is being given back is not bound again";
const IDENTITY: &str = "the identity of a NIC cannot be changed: make a new one";
const MOVED: &str = "the network of a NIC cannot be changed: make a new one";

/// Collects the cases of one kind; their objects are called after their numbers.
struct Kind {
    kind: &'static str,
    cases: Vec<Case>,
}

impl Kind {
    fn new(kind: &'static str) -> Self {
        Self { kind, cases: Vec::new() }
    }

    fn add(
        mut self,
        name: &'static str,
        (before, spec): (Option<Value>, Value),
        refused: Option<&'static str>,
    ) -> Self {
        let object = format!("case-{}", self.cases.len());
        self.cases.push(Case { name, kind: self.kind, object, before, spec, refused });
        self
    }

    fn taken(self, name: &'static str, spec: Value) -> Self {
        self.add(name, (None, spec), None)
    }

    fn refused(self, name: &'static str, spec: Value, says: &'static str) -> Self {
        self.add(name, (None, spec), Some(says))
    }

    fn changed(self, name: &'static str, before: Value, spec: Value) -> Self {
        self.add(name, (Some(before), spec), None)
    }

    fn fixed(self, name: &'static str, before: Value, spec: Value, says: &'static str) -> Self {
        self.add(name, (Some(before), spec), Some(says))
    }

    /// The last one's object is called so.
    fn called(mut self, object: &str) -> Self {
        if let Some(last) = self.cases.last_mut() {
            object.clone_into(&mut last.object);
        }
        self
    }
}

fn networks() -> Vec<Case> {
    let soft = || json!({"soft": {}});
    let vni = |vni: u32| json!({"soft": {}, "vni": vni});
    let on = |fabric: &str, how: &str| json!({"rnic": {"fabric": fabric, "addressing": how}});
    let ipam =
        |cidr: &str, size: u32| json!({"soft": {}, "ipam": {"cidrs": [cidr], "blockSize": size}});
    Kind::new("RdmaNetwork")
        .taken("software carries it", soft())
        .taken("an RNIC carries it", on("storage", "Flat"))
        .taken(
            "all that a network can say",
            json!({
                "rnic": {"fabric": "storage"}, "vni": 16_777_215, "mtu": 9000,
                "companion": {"bridge": "br-blue"}, "allow": ["192.0.2.0/24", "fd00::/64"],
                "ipam": {"cidrs": ["10.0.0.0/16", "fd01::/64"], "blockSize": 64},
            }),
        )
        .refused("two backings", json!({"soft": {}, "rnic": {"fabric": "storage"}}), BACKING)
        .refused("no backing", json!({}), BACKING)
        .taken("a name of forty", soft())
        .called(&"x".repeat(40))
        .refused("a name of forty-one", soft(), NAME)
        .called(&"x".repeat(41))
        .refused("a name with a dot", soft(), NAME)
        .called("a.b")
        .changed("the MTU changes", vni(7), json!({"soft": {}, "vni": 7, "mtu": 1500}))
        .fixed("another VNI", vni(7), vni(8), VNI)
        .fixed("a VNI is taken out", vni(7), soft(), VNI)
        .fixed("a VNI is put in", soft(), vni(7), VNI)
        .fixed("from software to an RNIC", soft(), on("storage", "Flat"), CARRIER)
        .fixed("from an RNIC to software", on("storage", "Flat"), soft(), CARRIER)
        .fixed("another fabric", on("storage", "Flat"), on("compute", "Flat"), FABRIC)
        .fixed("other addressing", on("storage", "Flat"), on("storage", "Translated"), FABRIC)
        .changed(
            "the addressing that is the default is written out",
            json!({"rnic": {"fabric": "storage"}}),
            on("storage", "Translated"),
        )
        .fixed("other blocks", ipam("10.0.0.0/16", 64), ipam("10.0.0.0/16", 16), BLOCKS)
        .fixed(
            "other blocks than those that are the default",
            json!({"soft": {}, "ipam": {"cidrs": ["10.0.0.0/16"]}}),
            ipam("10.0.0.0/16", 16),
            BLOCKS,
        )
        .changed(
            "the size of blocks that is the default is written out",
            json!({"soft": {}, "ipam": {"cidrs": ["10.0.0.0/16"]}}),
            ipam("10.0.0.0/16", 64),
        )
        .changed("more ranges", ipam("10.0.0.0/16", 16), ipam("10.0.0.0/15", 16))
        .refused("VNI 1", vni(1), "spec.vni in body should be greater than or equal to 2")
        .refused(
            "a VNI of 25 bits",
            vni(1 << 24),
            "spec.vni in body should be less than or equal to 16777215",
        )
        .refused(
            "an MTU below IPv4's",
            json!({"soft": {}, "mtu": 575}),
            "spec.mtu in body should be greater than or equal to 576",
        )
        .refused(
            "a range that is none",
            ipam("10.0.0.0", 64),
            "spec.ipam.cidrs[0] in body should match",
        )
        .refused(
            "a range of no address",
            ipam("10.0.0.256/16", 64),
            "spec.ipam.cidrs[0] in body should match",
        )
        .refused(
            "a range of 33 bits",
            ipam("10.0.0.0/33", 64),
            "spec.ipam.cidrs[0] in body should match",
        )
        .taken("a range with bits behind its prefix", ipam("10.0.0.1/16", 64))
        .refused("a block of 48", ipam("10.0.0.0/16", 48), "spec.ipam.blockSize: Unsupported value")
        .refused(
            "no range",
            json!({"soft": {}, "ipam": {"cidrs": []}}),
            "spec.ipam.cidrs in body should have at least 1 items",
        )
        .refused(
            "a bridge's name with a slash",
            json!({"soft": {}, "companion": {"bridge": "../br"}}),
            "spec.companion.bridge in body should match",
        )
        .refused("addressing of no kind", on("storage", "Some"), "Unsupported value")
        .cases
}

fn blocks() -> Vec<Case> {
    let block = |network: &str, uid: &str, cidr: &str, node: &str, releasing: bool| {
        json!({
            "network": network, "networkUid": uid, "cidr": cidr, "node": node,
            "releasing": releasing,
        })
    };
    let range = "10.0.0.0/26";
    let bound = || block("blue", "u", range, "n1", false);
    let without = || json!({"network": "blue", "networkUid": "u", "cidr": range, "node": "n1"});
    Kind::new("RdmaIPBlock")
        .taken("a block", bound())
        .changed("it is given back", bound(), block("blue", "u", range, "n1", true))
        .changed(
            "it is given back, where nothing was said",
            without(),
            block("blue", "u", range, "n1", true),
        )
        .fixed("another node", bound(), block("blue", "u", range, "n2", false), BOUND)
        .fixed("another range", bound(), block("blue", "u", "10.0.0.64/26", "n1", false), BOUND)
        .fixed("another network", bound(), block("red", "u", range, "n1", false), BOUND)
        .fixed(
            "another network of this name",
            bound(),
            block("blue", "v", range, "n1", false),
            BOUND,
        )
        .fixed("bound again", block("blue", "u", range, "n1", true), bound(), RELEASING)
        .fixed(
            "bound again by silence",
            block("blue", "u", range, "n1", true),
            without(),
            RELEASING,
        )
        .refused(
            "no node",
            block("blue", "u", range, "", false),
            "spec.node in body should be at least 1 chars long",
        )
        .cases
}

fn nics() -> Vec<Case> {
    let nic = |network: &str| json!({"network": network});
    let mac = |n: u8| json!({"network": "blue", "mac": format!("02:00:00:00:00:0{n}")});
    Kind::new("RdmaNic")
        .taken(
            "a NIC",
            json!({"network": "blue", "mac": "02:00:00:00:00:01", "address": "10.0.0.1"}),
        )
        .changed("its class changes", nic("blue"), json!({"network": "blue", "class": "small"}))
        .fixed("another network", nic("blue"), nic("red"), MOVED)
        .fixed("another MAC address", mac(1), mac(2), IDENTITY)
        .fixed("no MAC address any more", mac(1), nic("blue"), IDENTITY)
        .fixed(
            "an address later",
            nic("blue"),
            json!({"network": "blue", "address": "10.0.0.1"}),
            IDENTITY,
        )
        .refused(
            "a group's MAC address",
            json!({"network": "blue", "mac": "03:00:00:00:00:01"}),
            "spec.mac in body should match",
        )
        .refused(
            "an address with a host's name",
            json!({"network": "blue", "address": "node1"}),
            "spec.address in body should match",
        )
        .cases
}

fn classes() -> Vec<Case> {
    let socket = |socket: Value| json!({ "socket": socket });
    Kind::new("RdmaNicClass")
        .taken(
            "all that a class can say",
            json!({
                "consumer": "Process", "vectors": 32, "addresses": "Ipam", "sharedHeap": true,
                "limits": {"maxQps": 64, "maxMrBytes": "1Gi", "maxKeptBytes": 1024},
                "rates": {"bandwidth": "10G", "messages": "1M", "commands": 100},
                "socket": {"owner": 107, "group": 107, "mode": "0660", "acl": ["u:108:rw"]},
            }),
        )
        .taken("a class that says nothing", json!({}))
        .changed(
            "a limit changes",
            json!({"limits": {"maxQps": 64}}),
            json!({"limits": {"maxQps": 32}}),
        )
        .refused(
            "memory with a space",
            json!({"limits": {"maxMrBytes": "1 Gi"}}),
            "spec.limits.maxMrBytes in body should match",
        )
        .refused(
            "QPs below nothing",
            json!({"limits": {"maxQps": -1}}),
            "spec.limits.maxQps in body should be greater than or equal to 0",
        )
        .refused(
            "33 vectors",
            json!({"vectors": 33}),
            "spec.vectors in body should be less than or equal to 32",
        )
        .refused(
            "mode 999",
            socket(json!({"mode": "999"})),
            "spec.socket.mode in body should match",
        )
        .refused(
            "an access list by name",
            socket(json!({"acl": ["u:qemu:rw"]})),
            "spec.socket.acl[0] in body should match",
        )
        .refused("a consumer of no kind", json!({"consumer": "Guest"}), "Unsupported value")
        .cases
}

fn policies() -> Vec<Case> {
    let pool = |name: &str, count: u32| json!({"name": name, "network": "blue", "count": count});
    let pools = |pools: &[Value]| json!({"nodeSelector": {}, "pools": pools});
    let rnic = |fabric: &str| {
        json!({"rnics": [{"selector": {"vendors": ["15b3"]}, "fabric": fabric,
            "hostAddress": "192.0.2.0/24"}]})
    };
    Kind::new("RdmaNodePolicy")
        .taken("a policy", pools(&[pool("blue", 16), pool("fast", 1)]))
        .taken("RNICs of a fabric", rnic("storage"))
        .refused(
            "two pools of a name",
            pools(&[pool("blue", 1), pool("blue", 2)]),
            "spec.pools[1]: Duplicate value",
        )
        .refused(
            "a pool of none",
            pools(&[pool("blue", 0)]),
            "spec.pools[0].count in body should be greater than or equal to 1",
        )
        .refused(
            "a pool of more than there can be",
            pools(&[pool("blue", 8193)]),
            "spec.pools[0].count in body should be less than or equal to 8192",
        )
        .refused(
            "a pool that no kubelet takes",
            pools(&[pool("Blue", 1)]),
            "spec.pools[0].name in body should match",
        )
        .refused("a fabric with a space", rnic("a b"), "spec.rnics[0].fabric in body should match")
        .refused(
            "a priority beyond all",
            json!({"priority": 1001}),
            "spec.priority in body should be less than or equal to 1000",
        )
        .refused(
            "nobody may be unavailable",
            json!({"rollout": {"evict": true, "maxUnavailable": 0}}),
            "spec.rollout.maxUnavailable in body should be greater than or equal to 1",
        )
        .cases
}

fn tenants() -> Vec<Case> {
    let quota = |quota: Value| json!({"namespaceSelector": {}, "quota": quota});
    Kind::new("RdmaTenant")
        .taken("a tenant", quota(json!({"nics": 8, "qps": "1k", "mrBytes": "8Gi"})))
        .refused(
            "no selector",
            json!({"networks": ["blue"]}),
            "spec.namespaceSelector: Required value",
        )
        .refused(
            "a quota below nothing",
            quota(json!({"nics": -1})),
            "spec.quota.nics in body should be greater than or equal to 0",
        )
        .refused(
            "a quantity that is a word",
            quota(json!({"bandwidth": "much"})),
            "spec.quota.bandwidth in body should match",
        )
        .refused(
            "an operator of no kind",
            json!({"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}}),
            "Unsupported value",
        )
        .cases
}

/// All of them.
#[must_use]
pub(crate) fn all() -> Vec<Case> {
    [networks(), blocks(), nics(), classes(), policies(), tenants()].concat()
}
