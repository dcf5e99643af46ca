//! Holds the definitions against a real API server: `cargo xtask k8s definitions` calls it with
//! `manifests/crds/base` and an empty server of its own (`KUBECONFIG`).
//!
//! A schema that a library takes may still be refused by a server, for what its rules would cost
//! among others; and what a server makes of an object, defaults, pruned fields, merged lists,
//! columns, is nowhere but there. Each line of the output is one row of JSON: `name`, `ok`, and
//! what was said where it is not.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Request,
    ValidationDirective, WatchParams,
};
use kube::core::WatchEvent;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

#[path = "../tests/cases/mod.rs"]
mod cases;

use cases::Case;

type Failure = Box<dyn std::error::Error>;

/// How long a server may take to serve a kind.
const WAIT: Duration = Duration::from_secs(60);

fn fail<T>(text: impl Into<String>) -> Result<T, Failure> {
    Err(text.into().into())
}

/// The definitions as they are in the files, applied as `kubectl apply --server-side` would.
async fn define(client: &Client, dir: &Path) -> Result<Vec<CustomResourceDefinition>, Failure> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.ends_with("kustomization.yaml") {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let wanted: Value = serde_saphyr::from_str(&text)?;
        let name = wanted.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        api.patch(name, &strict(), &Patch::Apply(&wanted)).await?;
        all.push(served(&api, name).await?);
    }
    Ok(all)
}

/// Applied, and refused where it has fields that there are not.
fn strict() -> PatchParams {
    let field_validation = Some(ValidationDirective::Strict);
    PatchParams { field_validation, ..PatchParams::apply("defined") }
}

/// Waits until the server serves a kind; what it has against the definition is an error.
async fn served(
    api: &Api<CustomResourceDefinition>,
    name: &str,
) -> Result<CustomResourceDefinition, Failure> {
    let begun = Instant::now();
    loop {
        let crd = api.get(name).await?;
        let conditions = crd.status.iter().flat_map(|s| s.conditions.iter().flatten());
        let mut ready = false;
        for condition in conditions {
            let holds = condition.status == "True";
            match condition.type_.as_str() {
                "Established" => ready |= holds,
                "NonStructuralSchema" | "KubernetesAPIApprovalPolicyConformant" if holds => {
                    return fail(format!("{name}: {condition:?}"));
                }
                "NamesAccepted" if !holds => return fail(format!("{name}: {condition:?}")),
                _ => {}
            }
        }
        if ready {
            return Ok(crd);
        }
        if begun.elapsed() > WAIT {
            return fail(format!("{name} is not served: {:?}", crd.status));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The resource of a kind, as its definition says.
fn resource(all: &[CustomResourceDefinition], kind: &str) -> Result<(ApiResource, bool), Failure> {
    let Some(crd) = all.iter().find(|crd| crd.spec.names.kind == kind) else {
        return fail(format!("no definition of {kind}"));
    };
    let resource = ApiResource {
        group: crd.spec.group.clone(),
        version: "v1alpha1".into(),
        api_version: format!("{}/v1alpha1", crd.spec.group),
        kind: kind.into(),
        plural: crd.spec.names.plural.clone(),
    };
    Ok((resource, crd.spec.scope == "Namespaced"))
}

fn api(
    client: &Client,
    all: &[CustomResourceDefinition],
    kind: &str,
) -> Result<Api<DynamicObject>, Failure> {
    let (resource, namespaced) = resource(all, kind)?;
    Ok(if namespaced {
        Api::namespaced_with(client.clone(), "default", &resource)
    } else {
        Api::all_with(client.clone(), &resource)
    })
}

/// One request of the table. Its object is gone afterwards.
async fn request(api: &Api<DynamicObject>, case: &Case) -> Result<(), Failure> {
    let params = PostParams::default();
    let object = |spec: &Value| serde_json::from_value::<DynamicObject>(case.whole(spec));
    let answer = match &case.before {
        None => api.create(&params, &object(&case.spec)?).await,
        Some(before) => {
            let made = api.create(&params, &object(before)?).await?;
            let mut new = object(&case.spec)?;
            new.metadata.resource_version = made.resource_version();
            api.replace(&case.object, &params, &new).await
        }
    };
    if api.get_opt(&case.object).await?.is_some() {
        api.delete(&case.object, &DeleteParams::default()).await?;
    }
    match (answer, case.refused) {
        (Ok(_), None) => Ok(()),
        (Ok(made), Some(says)) => fail(format!("it is taken, not refused with {says:?}: {made:?}")),
        (Err(kube::Error::Api(status)), Some(says)) => {
            let words = status.code == 422 && status.message.contains(says);
            if words { Ok(()) } else { fail(format!("{}: {}", status.code, status.message)) }
        }
        (Err(error), _) => fail(error.to_string()),
    }
}

/// What is not said is as the types say, and what no type has is refused or not kept.
async fn defaults(client: &Client, all: &[CustomResourceDefinition]) -> Result<(), Failure> {
    let networks = api(client, all, "RdmaNetwork")?;
    let object = json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": "RdmaNetwork",
        "metadata": {"name": "defaults"},
        "spec": {"rnic": {"fabric": "f"}, "ipam": {"cidrs": ["10.0.0.0/16"]}, "colour": "blue"},
    });
    match networks.patch("defaults", &strict(), &Patch::Apply(&object)).await {
        Err(kube::Error::Api(status)) if status.message.contains("spec.colour") => {}
        other => return fail(format!("a field that there is not: {other:?}")),
    }
    let object: DynamicObject = serde_json::from_value(object)?;
    let made = networks.create(&PostParams::default(), &object).await?;
    networks.delete("defaults", &DeleteParams::default()).await?;
    for (at, wanted) in [
        ("/spec/rnic/addressing", Some(json!("Translated"))),
        ("/spec/ipam/blockSize", Some(json!(64))),
        ("/spec/colour", None),
    ] {
        let found = made.data.pointer(at).cloned();
        if found != wanted {
            return fail(format!("{at} is {found:?}, not {wanted:?}"));
        }
    }
    Ok(())
}

/// The state is written by its own door only, and two writers' conditions are both kept.
async fn states(client: &Client, all: &[CustomResourceDefinition]) -> Result<(), Failure> {
    let networks = api(client, all, "RdmaNetwork")?;
    let head = json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": "RdmaNetwork",
        "metadata": {"name": "states"},
    });
    let with = |key: &str, value: Value| {
        let mut object = head.clone();
        if let Some(map) = object.as_object_mut() {
            map.insert(key.to_owned(), value);
        }
        object
    };
    let mut object = with("spec", json!({"soft": {}}));
    object["status"] = json!({"vni": 9});
    let object: DynamicObject = serde_json::from_value(object)?;
    let made = networks.create(&PostParams::default(), &object).await?;
    if made.data.get("status").is_some() {
        return fail(format!("whoever makes an object writes its state: {made:?}"));
    }
    for (manager, kind) in [("one", "Accepted"), ("two", "Ready")] {
        let condition = json!({
            "type": kind, "status": "True", "reason": "Test", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let state = with("status", json!({"conditions": [condition]}));
        let params = PatchParams::apply(manager).force();
        networks.patch_status("states", &params, &Patch::Apply(&state)).await?;
    }
    let now = networks.get("states").await?;
    networks.delete("states", &DeleteParams::default()).await?;
    let conditions = now.data.pointer("/status/conditions").and_then(Value::as_array);
    let kinds: Vec<&str> = conditions
        .into_iter()
        .flatten()
        .filter_map(|condition| condition.get("type")?.as_str())
        .collect();
    if kinds != ["Accepted", "Ready"] || now.metadata.generation != Some(1) {
        return fail(format!("the conditions are {kinds:?}: {now:?}"));
    }
    Ok(())
}

/// What `kubectl get` prints, for an object of each kind that the table has one of.
async fn columns(
    client: &Client,
    all: &[CustomResourceDefinition],
    case: &Case,
) -> Result<(), Failure> {
    let api = api(client, all, case.kind)?;
    let object = serde_json::from_value(case.whole(&case.spec))?;
    api.create(&PostParams::default(), &object).await?;
    let request = Request::new(api.resource_url()).get(&case.object, &Default::default())?;
    let (mut parts, body) = request.into_parts();
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    parts.headers.insert("accept", table.parse()?);
    let answer: Value = client.request(http::Request::from_parts(parts, body)).await?;
    api.delete(&case.object, &DeleteParams::default()).await?;
    let count = |at: &str| answer.pointer(at).and_then(Value::as_array).map_or(0, Vec::len);
    let crd = all.iter().find(|crd| crd.spec.names.kind == case.kind);
    let wanted = crd
        .and_then(|crd| crd.spec.versions.first()?.additional_printer_columns.as_ref())
        .map_or(0, Vec::len);
    // Before those of the definition comes the name.
    if count("/columnDefinitions") != wanted + 1 || count("/rows/0/cells") != wanted + 1 {
        return fail(format!("{wanted} columns are defined, and printed is {answer}"));
    }
    Ok(())
}

/// Short names and the category are served.
async fn names(client: &Client, all: &[CustomResourceDefinition]) -> Result<(), Failure> {
    let list = client.list_api_group_resources("vhost-rdma.io/v1alpha1").await?;
    for crd in all {
        let names = &crd.spec.names;
        let found = list.resources.iter().find(|resource| resource.name == names.plural);
        let same = found.is_some_and(|resource| {
            resource.short_names == names.short_names && resource.categories == names.categories
        });
        if !same {
            return fail(format!("{}: {found:?}", names.kind));
        }
    }
    Ok(())
}

/// A watch that begins with what is there, told as events, up to the bookmark.
async fn streamed(client: &Client, all: &[CustomResourceDefinition]) -> Result<(), Failure> {
    let networks = api(client, all, "RdmaNetwork")?;
    let object = json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": "RdmaNetwork",
        "metadata": {"name": "streamed"}, "spec": {"soft": {}},
    });
    networks.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    let params = WatchParams::default().initial_events().timeout(20);
    let mut events = networks.watch(&params, "0").await?.boxed();
    let mut seen = false;
    let mut ended = false;
    while let Some(event) = events.next().await {
        match event? {
            WatchEvent::Added(network) => seen |= network.name_any() == "streamed",
            WatchEvent::Bookmark(bookmark) => {
                let mark = "k8s.io/initial-events-end";
                if bookmark.metadata.annotations.contains_key(mark) {
                    ended = true;
                    break;
                }
            }
            other => return fail(format!("{other:?}")),
        }
    }
    networks.delete("streamed", &DeleteParams::default()).await?;
    if seen && ended { Ok(()) } else { fail(format!("the object: {seen}, the end: {ended}")) }
}

fn tell(name: &str, result: &Result<(), Failure>) {
    let said = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
    println!("{}", json!({"name": name, "ok": result.is_ok(), "said": said}));
}

async fn run(dir: &Path) -> Result<(), Failure> {
    let client = Client::try_default().await?;
    let all = define(&client, dir).await?;
    tell("definitions are taken and served", &if all.len() == 7 { Ok(()) } else { fail("not 7") });
    let mut printed = Vec::new();
    for case in cases::all() {
        let name = format!("{}: {}", case.kind, case.name);
        tell(&name, &request(&api(&client, &all, case.kind)?, &case).await);
        if case.refused.is_none() && !printed.contains(&case.kind) {
            printed.push(case.kind);
            tell(&format!("{}: columns", case.kind), &columns(&client, &all, &case).await);
        }
    }
    tell("defaults, and fields that there are not", &defaults(&client, &all).await);
    tell("states of two writers", &states(&client, &all).await);
    tell("short names and the category", &names(&client, &all).await);
    tell("a list that is streamed", &streamed(&client, &all).await);
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1) else {
        eprintln!("usage: defined DIR");
        return ExitCode::from(2);
    };
    // Of two providers none would be the default.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match run(Path::new(&dir)).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the definitions: {error}");
            ExitCode::FAILURE
        }
    }
}
