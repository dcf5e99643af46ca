//! Certificates of nodes, and pods too many: what the controller answers when it is asked.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::exec::{wait_for, workspace};
use crate::k8s::cluster::{self, NAMESPACE, POOL, USERS};
use crate::k8s::kubectl::Kubectl;
use crate::k8s::ours;
use crate::k8s::pods::Wanted;
use crate::k8s::test::Bench;

const WAIT: Duration = Duration::from_secs(90);
const DIR: &str = "/lab/trust";
const SIGNER: &str = "vhost-rdma.io/channel";
/// By which names the controller's certificate is known.
const SERVICE: &str = "vhost-rdma-controller.vhost-rdma.svc";

fn pause() {
    std::thread::sleep(Duration::from_millis(200));
}

/// A token of the agents' account that is bound to a pod on the node, as the kubelet would get it
/// for an agent's pod: `$1` the pod.
pub(crate) const TOKEN: &str = r#"
mkdir -p /lab/trust; cd /lab/trust
k='kubectl --kubeconfig=/lab/pki/admin.kubeconfig -n vhost-rdma'
uid=$($k get pod "$1" -o 'jsonpath={.metadata.uid}')
cat > token.json <<END
{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
 "metadata": {"name": "vhost-rdma-agent"},
 "spec": {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "$1", "uid": "$uid"},
          "expirationSeconds": 3600}}
END
token=$($k create -f token.json \
  --raw /api/v1/namespaces/vhost-rdma/serviceaccounts/vhost-rdma-agent/token \
  | sed -n 's/.*"token":"\([^"]*\)".*/\1/p')
sed -n '1,4p' /lab/pki/admin.kubeconfig > agent.kubeconfig
cat >> agent.kubeconfig <<END
users: [{name: agent, user: {token: $token}}]
contexts: [{name: lab, context: {cluster: lab, user: agent}}]
current-context: lab
END
"#;

/// Asks for a certificate: `$1` name, `$2` node, `$3` address, `$4` kubeconfig.
const ASK: &str = r#"
cd /lab/trust
openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
openssl req -new -key "$1.key" -subj "/O=vhost-rdma:nodes/CN=vhost-rdma:node:$2" \
  -addext "subjectAltName=IP:$3" -out "$1.csr"
kubectl --kubeconfig="$4" create -f - <<END
apiVersion: certificates.k8s.io/v1
kind: CertificateSigningRequest
metadata: {name: $1}
spec:
  signerName: vhost-rdma.io/channel
  request: $(base64 -w0 < "$1.csr")
  usages: [digital signature, client auth, server auth]
END
"#;

/// Speaks to the controller until it answers or ends the connection: the type of its first frame,
/// which is SETTINGS (4) for whom it lets in (RFC 9113, 3.4 and 6.5). In TLS 1.3 a client is done
/// before its certificate is looked at; who leaves at once does not hear that it was refused.
const CONNECT: &str = r#"
cd /lab/trust; rm -f got said
printf 'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\000\000\000\004\000\000\000\000\000' \
  | timeout 30 openssl s_client -quiet -connect 127.0.0.1:9748 -tls1_3 -alpn h2 -CAfile roots.crt \
    -verify_return_error -verify_hostname @SERVICE@ @MORE@ > got 2> said &
while kill -0 $! 2>/dev/null && [ ! -s got ]; do sleep 0.1; done
kill $! 2>/dev/null || :
cat said
if [ -s got ]; then
  echo "answered: $(dd if=got bs=1 skip=3 count=1 2>/dev/null | od -An -tx1 | tr -d ' ')"
else echo "answered: nothing"; fi
"#;

/// A node of the cluster that is nowhere: its name and its address.
const ELSEWHERE: [&str; 2] = ["elsewhere", "10.98.0.1"];
pub(crate) const NODE: &str = r#"
k='kubectl --kubeconfig=/lab/pki/admin.kubeconfig'
printf '{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "%s"}}' "$1" | $k create -f -
at='{"type": "InternalIP", "address": "'"$2"'"}'
$k get node "$1" -o json | sed 's/"status": {/"status": {"addresses": ['"$at"'],/' \
  > /lab/trust/node.json
$k replace --raw "/api/v1/nodes/$1/status" -f /lab/trust/node.json
"#;

struct Asked<'a> {
    name: &'a str,
    node: &'a str,
    address: &'a str,
    config: &'a str,
}

/// What became of a request: its reason, or nothing if it was signed; the file is then in the node.
fn ask(bench: &Bench<'_>, asked: &Asked<'_>) -> Result<Option<String>> {
    let Asked { name, node, address, config } = asked;
    bench.node.run(&["sh", "-ec", ASK, "sh", name, node, address, config])?;
    let answer = wait_for(&format!("an answer to the request {name}"), WAIT, || {
        pause();
        let request = bench.pods.kubectl.get(&["csr", name])?;
        if request.pointer("/status/certificate").is_some() {
            return Ok(Some(None));
        }
        let conditions = request.pointer("/status/conditions").and_then(Value::as_array).cloned();
        let refused = conditions.into_iter().flatten().find(|condition| {
            ["Denied", "Failed"].iter().any(|kind| condition.get("type") == Some(&(*kind).into()))
        });
        let text = |c: Value| c.get("reason").and_then(Value::as_str).map(str::to_owned);
        Ok(refused.and_then(text).map(Some))
    })?;
    if answer.is_none() {
        let path = "jsonpath={.status.certificate}";
        bench.node.sh(&format!(
            "kubectl --kubeconfig=/lab/pki/admin.kubeconfig get csr {name} -o '{path}' \
             | base64 -d > {DIR}/{name}.crt"
        ))?;
    }
    Ok(answer)
}

fn roots(kubectl: Kubectl<'_>) -> Result<(usize, String)> {
    let map = kubectl.get(&["configmap", "vhost-rdma-channel-roots", "-n", NAMESPACE])?;
    let text = |key: &str| map.pointer(&format!("/data/{key}")).and_then(Value::as_str);
    let all = text("ca.crt").context("no roots")?.matches("BEGIN CERTIFICATE").count();
    Ok((all, text("current").context("nothing says which root signs")?.to_owned()))
}

/// A node's agent gets a certificate for what its node has, and nobody gets another; the
/// controller shows one of the same root, and lets in who has one.
pub(crate) fn certificates(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.run(&["create", "serviceaccount", "vhost-rdma-agent", "-n", NAMESPACE])?;
    kubectl.run(&["create", "serviceaccount", "default", "-n", NAMESPACE]).ok();
    let mut pod = Wanted { pool: None, ..Wanted::new("an-agent", POOL) }.manifest();
    pod["metadata"]["namespace"] = NAMESPACE.into();
    pod["spec"]["serviceAccountName"] = "vhost-rdma-agent".into();
    kubectl.create(&pod)?;
    wait_for("the agent's pod to be on its node", WAIT, || {
        pause();
        let pod = kubectl.get(&["pod", "an-agent", "-n", NAMESPACE])?;
        Ok(pod.pointer("/spec/nodeName").map(drop))
    })?;
    bench.node.run(&["sh", "-ec", TOKEN, "sh", "an-agent"])?;
    let config = format!("{DIR}/agent.kubeconfig");
    let own = format!("10.222.{}.1", bench.node.subnet());
    let good = Asked { name: "good", node: "node1", address: &own, config: &config };
    let said = ask(bench, &good)?;
    ensure!(said.is_none(), "the node's own request is refused: {said:?}");
    let [elsewhere, there] = ELSEWHERE;
    bench.node.run(&["sh", "-ec", NODE, "sh", elsewhere, there])?;
    let admin = "/lab/pki/admin.kubeconfig";
    for (asked, reason) in [
        (Asked { name: "for-another", node: elsewhere, address: there, ..good }, "AnotherNode"),
        (Asked { name: "by-another", config: admin, ..good }, "NotAnAgent"),
        (Asked { name: "not-its-own", address: "10.99.0.1", ..good }, "NotOfNode"),
    ] {
        let said = ask(bench, &asked)?;
        ensure!(said.as_deref() == Some(reason), "{}: {said:?}, not {reason}", asked.name);
    }
    kubectl.run(&["delete", "node", elsewhere])?;
    shown(bench, &own)?;
    // Another root: both are trusted, then the new one signs, then the old one goes.
    let (_, before) = roots(kubectl)?;
    let begun = Instant::now();
    let secret = "vhost-rdma-channel-ca";
    kubectl.run(&[
        "annotate",
        "secret",
        secret,
        "-n",
        NAMESPACE,
        "vhost-rdma.io/rotate=now",
        "--overwrite",
    ])?;
    wait_for("two roots", WAIT, || {
        pause();
        Ok((roots(kubectl)?.0 == 2).then_some(()))
    })?;
    wait_for("one root, and another", WAIT, || {
        pause();
        let (all, current) = roots(kubectl)?;
        Ok((all == 1 && current != before).then_some(()))
    })?;
    eprintln!("    another root after {:.1} s", begun.elapsed().as_secs_f64());
    let said = ask(bench, &Asked { name: "anew", ..good })?;
    ensure!(said.is_none(), "refused after the rotation: {said:?}");
    trusted(bench, "anew")?;
    ensure!(trusted(bench, "good").is_err(), "a certificate of the root before is still trusted");
    let all = kubectl.get(&["csr"])?;
    let items = all.get("items").and_then(Value::as_array).context("no requests")?;
    let ours = items.iter().filter(|item| item.pointer("/spec/signerName") == Some(&SIGNER.into()));
    ensure!(ours.count() >= 5, "the requests are gone");
    kubectl.run(&["delete", "csr", "--all"])?;
    kubectl.run(&["delete", "pod", "an-agent", "-n", NAMESPACE, "--wait=false"])?;
    kubectl.wait_gone(&["pod", "an-agent", "-n", NAMESPACE])
}

/// The roots of now trust a certificate.
fn trusted(bench: &Bench<'_>, name: &str) -> Result<()> {
    let script = format!(
        "cd {DIR}
kubectl --kubeconfig=/lab/pki/admin.kubeconfig -n {NAMESPACE} get configmap \
    vhost-rdma-channel-roots \
  -o 'jsonpath={{.data.ca\\.crt}}' > roots.crt
openssl verify -CAfile roots.crt -purpose sslclient {name}.crt
openssl verify -CAfile roots.crt -purpose sslserver {name}.crt"
    );
    bench.node.sh(&script).map(drop)
}

/// What a node's certificate says, and what is at the other end of the controller's service.
fn shown(bench: &Bench<'_>, address: &str) -> Result<()> {
    trusted(bench, "good")?;
    let text = bench.node.sh(&format!("openssl x509 -in {DIR}/good.crt -noout -text"))?;
    for words in ["CN = vhost-rdma:node:node1", &format!("IP Address:{address}"), "CA:FALSE"] {
        ensure!(text.contains(words), "the certificate lacks {words:?}:\n{text}");
    }
    let connect = |more: &str| {
        let script = CONNECT.replace("@SERVICE@", SERVICE).replace("@MORE@", more);
        bench.node.sh(&script)
    };
    let known = connect("-cert good.crt -key good.key")?;
    ensure!(known.contains("answered: 04"), "a node is not let in:\n{known}");
    let nobody = connect("")?;
    ensure!(
        nobody.contains("alert certificate required") && nobody.contains("answered: nothing"),
        "anybody is let in:\n{nobody}"
    );
    Ok(())
}

/// Nothing asks the controller about pods any more.
pub(crate) fn unhooked(bench: &Bench<'_>) -> Result<()> {
    let named = ["validatingwebhookconfiguration", "vhost-rdma-controller", "--ignore-not-found"];
    bench.pods.kubectl.run(&[&["delete"], &named[..]].concat()).map(drop)
}

/// The configuration of `manifests/admission-old`, for a controller that is no pod.
pub(crate) fn hooked(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let dir = bench.node.path(DIR);
    fs::create_dir_all(&dir)?;
    let from = workspace().join("manifests/admission-old/webhook.yaml");
    fs::copy(from, dir.join("webhook.yaml"))?;
    let path = format!("{DIR}/webhook.yaml");
    let text = kubectl.run(&["create", "--dry-run=client", "-o", "json", "-f", &path])?;
    let mut object: Value = serde_json::from_str(&text)?;
    for hook in object["webhooks"].as_array_mut().context("no webhooks")? {
        hook["clientConfig"] = json!({ "url": format!("https://{SERVICE}:9749/admit") });
    }
    bench
        .node
        .sh(&format!("grep -q {SERVICE} /etc/hosts || echo 127.0.0.1 {SERVICE} >> /etc/hosts"))?;
    kubectl.create(&object)?;
    wait_for("the controller to say by which root it is known", WAIT, || {
        pause();
        let now = kubectl.get(&["validatingwebhookconfiguration", "vhost-rdma-controller"])?;
        let of = |n: usize, key: &str| {
            now.pointer(&format!("/webhooks/{n}/clientConfig/{key}")).cloned()
        };
        let known = (0..3).all(|n| {
            let url = of(n, "url");
            let url = url.as_ref().and_then(Value::as_str).unwrap_or_default();
            of(n, "caBundle").is_some() && url.contains("/admit/")
        });
        Ok(known.then_some(()))
    })?;
    // The API server hears of it a moment later.
    std::thread::sleep(Duration::from_secs(2));
    Ok(())
}

fn used(kubectl: Kubectl<'_>) -> Result<(u64, usize)> {
    let tenant = kubectl.get(&["rdmatenant", "physics"])?;
    let used = tenant.pointer("/status/used/nics").and_then(Value::as_u64).unwrap_or(0);
    let reserved = tenant.pointer("/status/reserved").and_then(Value::as_array);
    Ok((used, reserved.map_or(0, Vec::len)))
}

/// Of six pods that are made at once one gets the last place, and the others are refused with the
/// reason; without the controller other pods are made as ever.
pub(crate) fn admission(bench: &mut Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    let done = hooked(bench).and_then(|()| too_many(bench));
    let restored = unhooked(bench).and_then(|()| kubectl.apply(&cluster::tenant(None)));
    done?;
    restored?;
    cluster::reported(bench, &[USERS[0].to_owned()])
}

fn too_many(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    kubectl.apply(&cluster::tenant(Some(2)))?;
    wait_for("one place to be left", WAIT, || {
        pause();
        Ok((used(kubectl)? == (1, 0)).then_some(()))
    })?;
    let names: Vec<String> = (0..6).map(|n| format!("a-{n}")).collect();
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = names
            .iter()
            .map(|name| scope.spawn(|| kubectl.create(&Wanted::new(name, POOL).manifest())))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread ended")))
            .collect()
    });
    let made: Vec<&String> =
        names.iter().zip(&outcomes).filter(|(_, o)| o.is_ok()).map(|(name, _)| name).collect();
    let [made] = made[..] else { bail!("{made:?} were made: {outcomes:?}") };
    for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
        let said = format!("{error:#}");
        ensure!(
            said.contains("the quota of the tenant \"physics\" is full: nics would be 3 of 2"),
            "the refusal says: {said}"
        );
    }
    kubectl.wait_phase(made, "Running", WAIT)?;
    wait_for("the place to become a NIC", WAIT, || {
        pause();
        Ok((used(kubectl)? == (2, 0)).then_some(()))
    })?;
    kubectl.delete_pods(&[made])?;
    wait_for("the place to be free", WAIT, || {
        pause();
        Ok((used(kubectl)? == (1, 0)).then_some(()))
    })?;
    // A namespace of no tenant.
    let mut pod = Wanted::new("a-thief", POOL).manifest();
    pod["metadata"]["namespace"] = "rival".into();
    let said = kubectl.create(&pod).err().context("another tenant's pod was made")?;
    ensure!(format!("{said:#}").contains("belongs to no tenant"), "the refusal says: {said:#}");
    without_controller(bench)
}

fn without_controller(bench: &Bench<'_>) -> Result<()> {
    let kubectl = bench.pods.kubectl;
    bench.node.kill(ours::CONTROLLER, "KILL")?;
    let outcome = (|| {
        kubectl.create(&Wanted { pool: None, ..Wanted::new("a-plain", POOL) }.manifest())?;
        let mut pod = Wanted::new("a-waits", POOL).manifest();
        pod["metadata"]["labels"]["vhost-rdma.io/nics"] = "1".into();
        let said = kubectl.create(&pod).err().context("a pod was made unasked")?;
        ensure!(format!("{said:#}").contains("quota.vhost-rdma.io"), "it says: {said:#}");
        kubectl.delete_pods(&["a-plain"])
    })();
    cluster::start_controller(bench)?;
    outcome
}

/// Each metric that an alert or a panel names is one that daemon, agent or controller has.
pub(crate) fn metrics(bench: &mut Bench<'_>) -> Result<()> {
    let mut served = std::collections::BTreeSet::new();
    let get =
        |port: u16| bench.node.sh(&format!("busybox wget -q -O - http://127.0.0.1:{port}/metrics"));
    for text in [ours::metrics(bench.node)?, get(9746)?, get(9747)?] {
        let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        for (name, kind) in names {
            served.insert(if kind == "counter" {
                format!("{name}_total")
            } else {
                name.to_owned()
            });
        }
    }
    let unknown: Vec<String> =
        crate::monitoring::metrics()?.into_iter().filter(|name| !served.contains(name)).collect();
    ensure!(unknown.is_empty(), "nobody has {unknown:?}; there are {served:?}");
    Ok(())
}
