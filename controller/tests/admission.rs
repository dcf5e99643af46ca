//! `manifests/admission`: what only newer API servers have, by its schema and by an evaluator of
//! CEL. That servers read it so was not seen: the cluster of `cargo xtask k8s test` is older.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails")]

use std::fs;
use std::path::Path;

use cel::{Context, Program, Value as CelValue};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// The objects of a file.
fn objects(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests").join(file);
    let text = fs::read_to_string(path).unwrap();
    text.split("\n---\n").map(|text| serde_saphyr::from_str(text).unwrap()).collect()
}

/// Each value that a file has is one that the type knows.
fn known<T: Serialize + DeserializeOwned>(object: &Value) {
    let typed: T = serde_json::from_value(object.clone()).unwrap();
    within(object, &serde_json::to_value(typed).unwrap(), "");
}

fn within(given: &Value, read: &Value, path: &str) {
    match given {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = format!("{path}.{name}");
                let found = read.get(name);
                within(value, found.unwrap_or_else(|| panic!("unknown: {path}")), &path);
            }
        }
        Value::Array(items) => {
            for (n, value) in items.iter().enumerate() {
                within(value, &read[n], &format!("{path}[{n}]"));
            }
        }
        value => assert_eq!(value, read, "{path}"),
    }
}

fn holds(expression: &str, variables: &[(&str, Value)]) -> bool {
    let program = Program::compile(expression).unwrap();
    let mut context = Context::default();
    for (name, value) in variables {
        context.add_variable(*name, value.clone()).unwrap();
    }
    match program.execute(&context).unwrap() {
        CelValue::Bool(holds) => holds,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_field_is_one_of_the_api() {
    for file in ["admission/webhook.yaml", "admission-old/webhook.yaml"] {
        objects(file).iter().for_each(known::<ValidatingWebhookConfiguration>);
    }
    let all = objects("admission/own-node.yaml");
    assert_eq!(all.len(), 4);
    for pair in all.chunks(2) {
        let [policy, binding] = pair else { panic!("two objects") };
        known::<ValidatingAdmissionPolicy>(policy);
        known::<ValidatingAdmissionPolicyBinding>(binding);
        assert_eq!(policy["metadata"]["name"], binding["spec"]["policyName"]);
    }
}

#[test]
fn the_webhook_is_asked_about_pods_that_ask_for_nics_and_no_others() {
    let hook = &objects("admission/webhook.yaml")[0]["webhooks"][0];
    let expression = hook["matchConditions"][0]["expression"].as_str().unwrap();
    let asked = |spec: Value| holds(expression, &[("object", json!({ "spec": spec }))]);
    let nic = json!({"resources": {"limits": {"cpu": "1", "vhost-rdma.io/blue": "1"}}});
    let requests = json!({"resources": {"requests": {"vhost-rdma.io/blue": "1"}}});
    let plain = json!({"name": "c"});
    let other = json!({"resources": {"limits": {"example.org/vhost-rdma.io": "1"}}});
    assert!(!asked(json!({"containers": [plain]})));
    assert!(!asked(json!({"containers": [plain, other], "initContainers": [plain]})));
    assert!(!asked(json!({"containers": [{"resources": {}}]})));
    assert!(asked(json!({"containers": [plain, nic]})));
    assert!(asked(json!({"containers": [requests]})));
    assert!(asked(json!({"containers": [plain], "initContainers": [nic]})));
}

#[test]
fn an_agent_writes_its_own_node_only() {
    let spec = &objects("admission/own-node.yaml")[0]["spec"];
    let text = |pointer: &str| spec.pointer(pointer).unwrap().as_str().unwrap();
    let agent = "system:serviceaccount:vhost-rdma:vhost-rdma-agent";
    let concerned = |user: &str| {
        let request = json!({"userInfo": {"username": user}});
        holds(text("/matchConditions/0/expression"), &[("request", request)])
    };
    assert!(concerned(agent) && !concerned("system:serviceaccount:vhost-rdma:other"));
    let node = format!("({})", text("/variables/0/expression"));
    let rule = text("/validations/0/expression").replace("variables.node", &node);
    let may = |extra: Value, name: &str| {
        let request = json!({"userInfo": {"extra": extra}});
        let object = json!({"metadata": {"name": name}});
        holds(&rule, &[("request", request), ("object", object)])
    };
    let on = |nodes: &[&str]| json!({"authentication.kubernetes.io/node-name": nodes});
    assert!(may(on(&["n1"]), "n1"));
    assert!(!may(on(&["n1"]), "n2"));
    assert!(!may(on(&["n1", "n2"]), "n2"));
    assert!(!may(json!({"authentication.kubernetes.io/pod-name": ["n1"]}), "n1"));
}

#[test]
fn an_agent_claims_nics_for_its_own_node_and_says_nothing_else_of_them() {
    let spec = &objects("admission/own-node.yaml")[2]["spec"];
    let text = |pointer: &str| spec.pointer(pointer).unwrap().as_str().unwrap();
    let rule = |n: usize| {
        let mut rule = text(&format!("/validations/{n}/expression")).to_owned();
        for (n, name) in ["node", "before", "after"].into_iter().enumerate() {
            let variable = format!("({})", text(&format!("/variables/{n}/expression")));
            rule = rule.replace(&format!("variables.{name}"), &variable);
        }
        rule
    };
    let may = |before: &Value, after: &Value| {
        let extra = json!({"authentication.kubernetes.io/node-name": ["n1"]});
        let request = json!({"userInfo": {"extra": extra}});
        (0..2).all(|n| {
            let (old, new) = (json!({"status": before}), json!({"status": after}));
            holds(&rule(n), &[("request", request.clone()), ("oldObject", old), ("object", new)])
        })
    };
    let at = |node: &str| json!({"node": node, "conditions": [{"type": "Accepted"}]});
    let free = json!({"conditions": [{"type": "Accepted"}]});
    assert!(may(&free, &at("n1")), "a claim");
    assert!(may(&at("n1"), &free), "its end");
    assert!(may(&at("n1"), &at("n1")), "the session");
    assert!(!may(&free, &at("n2")), "for another node");
    assert!(!may(&at("n2"), &free), "another node's");
    assert!(!may(&at("n2"), &at("n1")), "taken from another node");
    let said = json!({"node": "n1", "conditions": [{"type": "Accepted", "status": "True"}]});
    assert!(!may(&free, &said), "a condition");
    assert!(!may(&free, &json!({"node": "n1"})), "no conditions any more");
}
