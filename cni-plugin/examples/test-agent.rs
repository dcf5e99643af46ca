//! The node agent's side of the tests as a program, for a VM that has no kubelet and so no grants:
//! `test-agent SOCKET NICS`, where NICS is a file with the JSON of the pod `web-0`'s NICs. It ends
//! when it is killed.

// The conversation is the tests' own; what goes wrong in it ends the test.
#![allow(clippy::unwrap_used, dead_code)]

#[path = "../tests/lab/agent.rs"]
mod agent;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(nics)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: test-agent SOCKET NICS");
        std::process::exit(2);
    };
    let nics = serde_json::from_slice(&std::fs::read(nics).unwrap()).unwrap();
    let _agent = agent::FakeAgent::start(socket.as_ref(), nics);
    loop {
        std::thread::park();
    }
}
