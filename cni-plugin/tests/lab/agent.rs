//! The node agent's side: a ledger in memory behind a real socket, by the rules of the interface's
//! documentation.
//!
//! It can also kill the plugin that talks to it, with -9, before or after it heard a request: that
//! is a crash at each point of an attachment that the plugin cannot choose.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use vhost_rdma_agent_api::{
    Attachment, Checked, Detached, Fault, FaultKind, Live, Nic, Record, Reply, Request, State,
    Status, Step, decode, encode, read_message,
};

/// When to kill the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kill {
    /// When the request of this number (from 0) has come, which is then not served.
    Before(usize),
    /// When it has been served; the plugin sees no answer.
    After(usize),
}

/// What it holds.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// NICs by pod name.
    pub(crate) granted: BTreeMap<String, Vec<Nic>>,
    pub(crate) records: Vec<Record>,
    /// What is left of records whose NIC is free: addresses that are not given back.
    pub(crate) owed: Vec<Record>,
    /// It is of a release that knows nothing of them.
    pub(crate) old: bool,
    pub(crate) live: Option<Live>,
    pub(crate) status: Option<Status>,
    pub(crate) kill: Option<Kill>,
    pub(crate) asked: usize,
    pub(crate) requests: Vec<Request>,
    pub(crate) refuse: Option<(usize, FaultKind)>,
    /// Where changes are written and synced before they are answered, as the agent's journal is.
    pub(crate) journal: Option<std::fs::File>,
}

pub(crate) struct FakeAgent {
    ledger: Arc<Mutex<Ledger>>,
    socket: std::path::PathBuf,
}

impl FakeAgent {
    pub(crate) fn start(socket: &Path, nics: Vec<Nic>) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let mut ledger = Ledger::default();
        ledger.granted.insert("web-0".to_owned(), nics);
        let ledger = Arc::new(Mutex::new(ledger));
        let shared = Arc::clone(&ledger);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), ledger) = (stream, Arc::clone(&shared)) else { return };
                thread::spawn(move || serve(stream, &ledger));
            }
        });
        Self { ledger, socket: socket.to_owned() }
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    /// Has the next call killed.
    pub(crate) fn kill(&self, kill: Option<Kill>) {
        let mut ledger = self.ledger();
        (ledger.kill, ledger.asked) = (kill, 0);
    }

    /// Answers the next call's request of this number with a fault.
    pub(crate) fn refuse(&self, refuse: Option<(usize, FaultKind)>) {
        let mut ledger = self.ledger();
        (ledger.refuse, ledger.asked) = (refuse, 0);
    }

    /// Goes away: nobody listens any more.
    pub(crate) fn stop(self) {
        std::fs::remove_file(&self.socket).unwrap();
    }
}

fn serve(mut stream: UnixStream, ledger: &Mutex<Ledger>) {
    let Ok(bytes) = read_message(&stream) else { return };
    // One that is killed between its connect and its words said nothing; nonsense gets no answer,
    // which no caller takes for one.
    let Ok(request) = decode::<Request>(&bytes) else { return };
    let mut ledger = ledger.lock().unwrap();
    let number = ledger.asked;
    ledger.asked += 1;
    ledger.requests.push(request.clone());
    let changes = !matches!(request, Request::Status | Request::Check(_) | Request::Gc(_));
    if let Some(mut journal) = ledger.journal.as_ref().filter(|_| changes) {
        journal.write_all(&bytes).unwrap();
        journal.sync_data().unwrap();
    }
    let kill = || {
        let peer = rustix::net::sockopt::socket_peercred(&stream).unwrap().pid;
        rustix::process::kill_process(peer, rustix::process::Signal::KILL).unwrap();
    };
    if ledger.kill == Some(Kill::Before(number)) {
        return kill();
    }
    let reply = match ledger.refuse {
        Some((refused, fault)) if refused == number => {
            Reply::Fault(Fault { kind: fault, message: "refused for a test".to_owned() })
        }
        _ => ledger.answer(request),
    };
    if ledger.kill == Some(Kill::After(number)) {
        return kill();
    }
    let _ = stream.write_all(&encode(&reply).unwrap());
}

impl Ledger {
    fn answer(&mut self, request: Request) -> Reply {
        let owing = matches!(request, Request::Owing(_));
        match request {
            Request::Status => {
                let ready = Status { ready: true, ..Status::default() };
                Reply::Status(Box::new(self.status.clone().unwrap_or(ready)))
            }
            Request::Attach(attach) => {
                let mut nics = self.granted.get(&attach.pod.name).cloned().unwrap_or_default();
                if let Some(device) = &attach.device_id {
                    nics.retain(|nic| nic.id == *device);
                    if nics.is_empty() {
                        let message = format!("no NIC {device} was granted to this pod");
                        return Reply::Fault(Fault { kind: FaultKind::NotFound, message });
                    }
                    nics[0].if_name.clone_from(&attach.attachment.if_name);
                }
                for nic in &nics {
                    let known = |record: &Record| {
                        record.nic.id == nic.id && record.attachment == attach.attachment
                    };
                    if !self.records.iter().any(known) {
                        self.records.push(Record {
                            pod: attach.pod.clone(),
                            attachment: attach.attachment.clone(),
                            network: attach.network.clone(),
                            netns: attach.netns.clone(),
                            state: State::Attaching,
                            nic: nic.clone(),
                            steps: Vec::new(),
                            done: None,
                            config: attach.config.clone(),
                        });
                    }
                }
                Reply::Nics(nics)
            }
            Request::Intend(intend) => {
                for record in self.of(&intend.attachment).filter(|r| r.nic.id == intend.nic) {
                    record.steps.extend(intend.steps.clone());
                }
                Reply::Done
            }
            Request::Attached(attached) => {
                for done in attached.nics {
                    for record in self.of(&attached.attachment).filter(|r| r.nic.id == done.nic) {
                        (record.state, record.done) = (State::Attached, Some(done.clone()));
                    }
                }
                Reply::Done
            }
            Request::Check(attachment) => {
                let healthy = Live { healthy: true, ..Live::default() };
                let live = self.live.clone().unwrap_or(healthy);
                let records = self.of(&attachment).map(|record| record.clone());
                let checked: Vec<Checked> =
                    records.map(|record| Checked { record, live: live.clone() }).collect();
                if checked.is_empty() {
                    let message = "nothing is attached to this container".to_owned();
                    return Reply::Fault(Fault { kind: FaultKind::NotFound, message });
                }
                Reply::Checked(checked)
            }
            Request::Detach(detach) => {
                let of = |record: &&mut Record| {
                    record.attachment.container_id == detach.container_id
                        && detach.device_id.as_ref().is_none_or(|id| *id == record.nic.id)
                        && detach
                            .if_name
                            .as_ref()
                            .is_none_or(|name| *name == record.attachment.if_name)
                };
                let found = self.records.iter_mut().chain(&mut self.owed).filter(of);
                Reply::Records(
                    found
                        .map(|record| {
                            record.state = State::Detaching;
                            record.clone()
                        })
                        .collect(),
                )
            }
            Request::Owing(_) if self.old => {
                let message = "malformed message: unknown variant `owing`".to_owned();
                Reply::Fault(Fault { kind: FaultKind::BadRequest, message })
            }
            Request::Detached(Detached { attachment, nics })
            | Request::Owing(Detached { attachment, nics }) => {
                let of = |record: &Record| {
                    record.attachment == attachment
                        && (nics.is_empty() || nics.contains(&record.nic.id))
                };
                if !owing {
                    self.owed.retain(|record| !of(record));
                }
                let (ended, rest) = self.records.drain(..).partition(of);
                self.records = rest;
                if owing {
                    let addresses = |step: &Step| matches!(step, Step::Ipam { .. });
                    self.owed.extend(ended.into_iter().map(|mut record| {
                        record.steps.retain(addresses);
                        record
                    }));
                }
                Reply::Done
            }
            Request::Gc(gc) => Reply::Records(
                self.records
                    .iter()
                    .chain(&self.owed)
                    .filter(|r| r.network == gc.network && !gc.valid.contains(&r.attachment))
                    .cloned()
                    .collect(),
            ),
            Request::Cordon(_) | Request::Uncordon(_) => Reply::Done,
            Request::Forgotten => Reply::Records(Vec::new()),
        }
    }

    fn of(&mut self, attachment: &Attachment) -> impl Iterator<Item = &mut Record> {
        self.records.iter_mut().filter(move |record| record.attachment == *attachment)
    }
}
