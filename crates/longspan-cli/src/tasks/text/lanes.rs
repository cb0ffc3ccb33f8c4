//! The batches of a text: it is read at several places at once, at each in order.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use burn::tensor::TensorData;
use longspan::attention::{StateForm, StoredState};
use longspan::models::{LanguageModel, LanguageState};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Config;
use super::corpus::Corpus;
use crate::run::checkpoint::Place;
use crate::tasks::feed::Feed;
use crate::tasks::ranks::share;
use crate::tasks::tokens::{END, START, Tokenizer};

/// Tokens to learn from, each predicted from those before it.
#[derive(Debug, Clone)]
pub struct Segment {
    pub tokens: Vec<u32>,
    /// The state before them; `None` at a beginning.
    pub state: Option<LanguageState>,
    /// At most so many are computed at a time.
    pub cut: usize,
}

/// The tokens of a part of a corpus, over and over.
#[derive(Debug, Clone)]
struct Lane {
    corpus: Arc<Corpus>,
    tokenizer: Arc<Tokenizer>,
    range: Range<u64>,
    /// Where the piece begins that is being read, and where it ends.
    piece: u64,
    next: u64,
    tokens: Vec<u32>,
    used: usize,
    /// The last token that was given.
    last: u32,
}

impl Lane {
    /// Begins at `at` within `range`, after `used` tokens of the piece there.
    fn new(corpus: Arc<Corpus>, tokenizer: Arc<Tokenizer>, range: Range<u64>, at: u64, used: usize) -> Result<Self> {
        let (tokens, last) = (Vec::new(), START);
        let mut lane = Self { corpus, tokenizer, range, piece: at, next: at, tokens, used: 0, last };
        if used > 0 {
            lane.fill()?;
            lane.used = used;
        }
        Ok(lane)
    }

    /// Reads the piece that comes next. Every document ends with [`END`], and so does the whole before it begins anew.
    fn fill(&mut self) -> Result<()> {
        if self.next >= self.range.end {
            self.next = self.range.start;
        }
        let piece = self.corpus.piece(self.next, self.range.end)?;
        self.tokens = self.tokenizer.encode_piece(&piece.before, &piece.bytes)?;
        if piece.ends_document || piece.end >= self.range.end {
            self.tokens.push(END);
        }
        (self.piece, self.next, self.used) = (self.next, piece.end, 0);
        Ok(())
    }

    fn take(&mut self, count: usize, into: &mut Vec<u32>) -> Result<()> {
        let wanted = into.len() + count;
        while into.len() < wanted {
            if self.used == self.tokens.len() {
                self.fill()?;
            }
            let some = (self.tokens.len() - self.used).min(wanted - into.len());
            into.extend(&self.tokens[self.used..][..some]);
            self.used += some;
        }
        Ok(())
    }
}

/// A feed that reads a text at `batch_size` places at once, `backpropagate` segments at each in every step; states are carried from
/// step to step, and begin anew after `carry` segments.
pub struct Lanes {
    lanes: Vec<Lane>,
    /// They and their segments after the step that was asked for last.
    drawn: Vec<Lane>,
    segments: Vec<Segment>,
    /// The lanes whose states are here: all, but where ranks share them.
    own: Range<usize>,
    /// Their states, one after the other; `None` at a beginning, or where there are none.
    state: Option<LanguageState>,
    /// Tokens of a step. Segments that gradients reach through are computed as one, which gives the same numbers.
    segment: usize,
    /// Steps after which states begin anew.
    carry: usize,
    tokens: f64,
}

impl Lanes {
    /// Lanes that begin at even distances in `range` of the corpus.
    pub fn new(corpus: &Arc<Corpus>, tokenizer: &Arc<Tokenizer>, range: &Range<u64>, config: &Config) -> Result<Self> {
        let count = config.training.batch_size as u64;
        let length = range.end - range.start;
        let lanes = (0..count).map(|n| {
            let at = corpus.boundary(range.start + (u128::from(length) * u128::from(n) / u128::from(count)) as u64)?;
            let at = if at < range.end { at } else { range.start };
            Lane::new(corpus.clone(), tokenizer.clone(), range.clone(), at, 0)
        });
        let lanes: Vec<Lane> = lanes.collect::<Result<_>>()?;
        // The first piece tells how many bytes a token has.
        let first = corpus.piece(range.start, range.end)?;
        let tokens = tokenizer.encode_piece(&first.before, &first.bytes)?.len();
        if tokens == 0 {
            bail!("the tokenizer finds no tokens in the text; choose another one with --tokens");
        }
        let segment = config.task.segment * config.task.backpropagate;
        let tokens = length as f64 * tokens as f64 / first.bytes.len() as f64;
        Ok(Self {
            lanes,
            drawn: Vec::new(),
            segments: Vec::new(),
            own: 0..config.training.batch_size,
            state: None,
            segment,
            carry: config.task.carry.div_ceil(config.task.backpropagate),
            tokens,
        })
    }

    /// Takes note that the step that was asked for last is completed.
    pub fn carry(&mut self, states: &[LanguageState]) -> Result<()> {
        self.lanes.clone_from(&self.drawn);
        let states: Vec<&LanguageState> = states.iter().collect();
        self.state = if states.is_empty() { None } else { Some(LanguageState::join(&states)?) };
        Ok(())
    }

    /// Where the lanes stand, of which the other ranks hold some.
    pub fn place(&self, model: &LanguageModel, others: Vec<Place>) -> Result<Place> {
        let (mut forms, mut tensors, mut position) = (Vec::new(), Vec::new(), 0);
        let mut states: Vec<LanguageState> = self.state.iter().cloned().collect();
        for other in others {
            states.extend(Stand::of(other.note)?.state(model, other.tensors)?);
        }
        if !states.is_empty() {
            let state = LanguageState::join(&states.iter().collect::<Vec<_>>())?;
            position = state.position();
            for stored in model.store(&state)? {
                let (form, numbers) = stored.into_parts();
                forms.push((form, numbers.len()));
                tensors.extend(numbers);
            }
        }
        let lanes = self.lanes.iter().map(|lane| (lane.piece, lane.used, lane.last)).collect();
        Ok(Place { note: serde_json::to_value(Stand { lanes, forms, position })?, tensors })
    }

    /// Brings the lanes to where [`place`](Self::place) said.
    pub fn return_to(&mut self, model: &LanguageModel, place: Place) -> Result<()> {
        let stand = Stand::of(place.note)?;
        if stand.lanes.len() != self.lanes.len() {
            bail!(BROKEN);
        }
        for (lane, &(piece, used, last)) in self.lanes.iter_mut().zip(&stand.lanes) {
            let Lane { corpus, tokenizer, range, .. } = &lane;
            *lane = Lane { last, ..Lane::new(corpus.clone(), tokenizer.clone(), range.clone(), piece, used)? };
        }
        self.state = stand.state(model, place.tensors)?;
        Ok(())
    }
}

const BROKEN: &str = "the checkpoint does not say where the text stands; train a new run with --out";

/// Where the lanes stand, beside the numbers of their states.
#[derive(Serialize, Deserialize)]
struct Stand {
    /// Where each lane's piece begins, tokens used of it, and the last token.
    lanes: Vec<(u64, usize, u32)>,
    /// Each block's state, and how many tensors it has.
    forms: Vec<(StateForm, usize)>,
    position: usize,
}

impl Stand {
    fn of(note: Value) -> Result<Self> {
        serde_json::from_value(note).map_err(|_| anyhow!(BROKEN))
    }

    /// The states, from their tensors.
    fn state(self, model: &LanguageModel, tensors: Vec<TensorData>) -> Result<Option<LanguageState>> {
        let mut tensors = tensors.into_iter();
        let forms = self.forms.into_iter();
        let stored = forms.map(|(form, count)| StoredState::from_parts(form, tensors.by_ref().take(count).collect()));
        let stored: Vec<StoredState> = stored.collect();
        Ok(if stored.is_empty() { None } else { Some(model.restore(&stored, self.position)?) })
    }
}

impl Feed for Lanes {
    type Example = Segment;

    fn per_epoch(&self) -> usize {
        (self.tokens / (self.lanes.len() * self.segment) as f64).ceil().max(1.0) as usize
    }

    fn tokens(&self) -> f64 {
        self.tokens
    }

    fn batch(&mut self, step: usize) -> Result<Vec<&Segment>> {
        if step.is_multiple_of(self.carry) {
            self.state = None;
        }
        self.drawn.clone_from(&self.lanes);
        self.segments.clear();
        for (n, lane) in self.drawn.iter_mut().enumerate() {
            let state = self.state.as_ref().filter(|_| self.own.contains(&n));
            let state = state.map(|state| state.select(&[n - self.own.start])).transpose()?;
            let mut tokens = vec![if state.is_some() { lane.last } else { START }];
            lane.take(self.segment, &mut tokens)?;
            lane.last = tokens[self.segment];
            self.segments.push(Segment { tokens, state, cut: self.segment });
        }
        Ok(self.segments.iter().collect())
    }

    fn keep_share(&mut self, rank: usize, ranks: usize) -> Result<()> {
        self.own = share(self.lanes.len(), rank, ranks);
        let own: Vec<usize> = self.own.clone().collect();
        let state = self.state.take().filter(|_| !own.is_empty());
        self.state = state.map(|state| state.select(&own)).transpose()?;
        Ok(())
    }

    fn probe(&self) -> &[Segment] {
        &self.segments[self.own.clone()]
    }
}
