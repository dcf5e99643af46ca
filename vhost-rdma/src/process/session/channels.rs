//! Channels that a process has: of completions, and of the connection manager.

use std::os::fd::AsFd as _;

use zerocopy::IntoBytes as _;

use super::{CHANNEL, CHANNELS, Completions, GoesOn, Session, Tokens};
use crate::nic::Status;
use crate::process::messages::{Answer, Number, exactly};
use crate::process::socket::{self, Channel};

impl Session {
    pub(super) fn add_channel(&mut self, body: &[u8]) -> GoesOn {
        let made = if body.is_empty() { self.new_channel() } else { Err(Status::INVAL) };
        let number = match made {
            Ok(number) => number,
            Err(status) => return self.say(&Answer::of(status)),
        };
        let Some(completions) = self.channels.get_mut(&number) else { return false };
        let Some(ends) = completions.channel.ends() else { return false };
        let told = Number { number: number.into(), reserved: 0.into() };
        let answer = Answer::ok(told.as_bytes());
        let sent = socket::send(self.socket.as_fd(), answer.bytes(), &ends).is_ok();
        completions.channel.given();
        sent
    }

    fn new_channel(&mut self) -> Result<u32, Status> {
        if self.channels.len() >= CHANNELS {
            return Err(Status::NOMEM);
        }
        let place = self.house.channel_place().ok_or(Status::NOMEM)?;
        self.keep(CHANNEL)?;
        let channel = Channel::new().map_err(|_| Status::NOMEM)?;
        while self.last_channel == 0 || self.channels.contains_key(&self.last_channel) {
            self.last_channel = self.last_channel.wrapping_add(1);
        }
        let completions = Completions { channel, users: 0, _place: place };
        self.channels.insert(self.last_channel, completions);
        Ok(self.last_channel)
    }

    pub(super) fn remove_channel(&mut self, body: &[u8]) -> Result<Answer, Status> {
        let number = exactly::<Number>(body)?.number.get();
        if self.channels.get(&number).ok_or(Status::NOENT)?.users > 0 {
            return Err(Status::BUSY);
        }
        self.channels.remove(&number);
        self.keep(0)?;
        Ok(Answer::ok(&[]))
    }

    pub(super) fn add_cm(&mut self, body: &[u8]) -> GoesOn {
        let made = if body.is_empty() { self.new_cm() } else { Err(Status::INVAL) };
        let (number, mut tokens) = match made {
            Ok(made) => made,
            Err(status) => return self.say(&Answer::of(status)),
        };
        let Some([take, _]) = tokens.channel.ends() else { return false };
        let told = Number { number: number.into(), reserved: 0.into() };
        let answer = Answer::ok(told.as_bytes());
        let sent = socket::send(self.socket.as_fd(), answer.bytes(), &[take]).is_ok();
        tokens.channel.given();
        self.cm.insert(number, tokens);
        sent
    }

    fn new_cm(&mut self) -> Result<(u32, Tokens), Status> {
        if self.ctx == 0 {
            return Err(Status::STATE);
        }
        if self.cm.len() >= CHANNELS {
            return Err(Status::NOMEM);
        }
        let place = self.house.channel_place().ok_or(Status::NOMEM)?;
        self.keep(CHANNEL)?;
        let channel = Channel::new().map_err(|_| Status::NOMEM)?;
        let number = self.house.cm.add_channel(self.window.number(), self.bell.clone());
        Ok((number, Tokens { channel, _place: place }))
    }

    pub(super) fn remove_cm(&mut self, body: &[u8]) -> Result<Answer, Status> {
        let number = exactly::<Number>(body)?.number.get();
        self.cm.remove(&number).ok_or(Status::NOENT)?;
        self.house.cm.remove_channel(self.window.number(), number)?;
        self.keep(0)?;
        Ok(Answer::ok(&[]))
    }
}
