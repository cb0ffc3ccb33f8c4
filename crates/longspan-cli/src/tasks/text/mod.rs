//! Texts as they are, of any length: a language model learns to go on with them.

mod continuation;
mod corpus;
mod lanes;
mod model;
mod overlap;
mod score;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use burn::tensor::{Device, Int, Tensor, TensorData};
use longspan::backend::Peers;
use longspan::layers::CrossEntropyLoss;
use longspan::models::{LanguageModel, LanguageState};
use longspan::sample::SampleOptions;
use ppmd_rust::Ppmd7Encoder;

use super::feed::Feed as _;
use super::memory;
use super::simple::Simple;
use super::split::evenly;
use super::task::{self, Data, Loss, Shown, Task, Vocabulary};
use super::tokens::{END, Kind, SPECIALS, Tokenizer};
use crate::run::checkpoint::Place;
use crate::run::config::{self, TextSettings};
use crate::run::folder::RunFolder;
use crate::terminal::notes::note;
use crate::terminal::samples::{counted, visible};
use crate::terminal::shell;
pub use continuation::{Generated, Stops, Wish};
use corpus::Corpus;
use lanes::{Lanes, Segment};
use overlap::Overlap;
use score::{BitsPerByte, Cost, Passage, Scorer};

type Config = config::Config<TextSettings>;
type Answering<'a> = task::Answering<'a, TextSettings>;

/// Bytes that PPMd, beside which scores stand, learns from: those before what is held out.
const LEARNED: u64 = 8 << 20;

const PPMD_ORDER: u32 = 10;

/// Bytes of its memory for each byte that it reads. Random letters, of all texts tried, fill the most, more than 16.
const PPMD_MEMORY: u64 = 32;

const SIDE: &str = "text";

const LEAST: u64 = 100;

/// Tokens of the development loss, and of one stretch of them.
const DEVELOPMENT: usize = 32_768;
const STRETCH: usize = 1024;

const LEARNED_FROM: u64 = 64 << 20;

/// Stretches of passages that are scored side by side.
const STRETCHES: usize = 8;

/// Bytes of a passage, over which the interval of held-out bits is taken.
const PASSAGE: u64 = 16 * 1024;

pub struct Text {
    tokenizer: Arc<Tokenizer>,
    /// The processes that hold the stretches of each sequence, where it is cut.
    peers: Option<Arc<dyn Peers>>,
}

impl Task for Text {
    const EXAMPLES: &str = "segments";

    type Example = Segment;
    type Feed = Lanes;
    type Carried = LanguageState;
    type Text = Passage;
    type Model = LanguageModel;
    type Scores = BitsPerByte;
    type Settings = TextSettings;

    fn begin(config: &mut Config) -> Result<(Self, Data<Self>)> {
        let utf8 = config.task.tokens.as_deref() != Some("bytes");
        let corpus = Arc::new(Corpus::open(&config.data, utf8)?);
        let kind = kind(config, corpus.len())?;
        let parts = Parts::of(&corpus, config)?;
        let mut letters = BTreeSet::new();
        let (passages, sha256) = read_once(&corpus, &parts, config, |bytes| {
            if kind == Chosen::Known(Kind::Characters) {
                letters.extend(String::from_utf8_lossy(bytes).chars());
            }
        })?;
        let tokenizer = match &kind {
            Chosen::Known(kind) => {
                let letters: String = letters.into_iter().collect();
                Tokenizer::build(kind, std::iter::once(letters.as_str()))?
            }
            Chosen::Learned(size) => learned(&corpus, &parts.train, *size)?,
        };
        config.task.tokens = Some(match &kind {
            Chosen::Known(Kind::File(path)) => std::path::absolute(path)?.display().to_string(),
            Chosen::Known(_) => tokenizer.kind().into(),
            Chosen::Learned(_) => "bpe".into(),
        });
        say_hidden(&tokenizer, &corpus, &parts.train, config)?;
        let task = Self { tokenizer: Arc::new(tokenizer), peers: None };
        let data = task.divide(&corpus, &parts, passages, sha256, config)?;
        Ok((task, data))
    }

    fn load(folder: &RunFolder, _: &Config) -> Result<Self> {
        Ok(Self { tokenizer: Arc::new(Tokenizer::load(folder, SIDE)?), peers: None })
    }

    fn store(&self, folder: &RunFolder) -> Result<()> {
        self.tokenizer.store(folder, SIDE)
    }

    fn data(&self, config: &Config) -> Result<Data<Self>> {
        let corpus = Arc::new(Corpus::open(&config.data, !matches!(*self.tokenizer, Tokenizer::Bytes))?);
        let parts = Parts::of(&corpus, config)?;
        let (passages, sha256) = read_once(&corpus, &parts, config, |_| ())?;
        self.divide(&corpus, &parts, passages, sha256, config)
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        vec![Vocabulary { side: SIDE, kind: self.tokenizer.kind(), size: self.tokenizer.len() }]
    }

    fn model(&self, config: &Config, device: &Device) -> Result<LanguageModel> {
        model::model(config, self.tokenizer.len(), device)
    }

    fn size(segment: &Segment) -> (usize, usize) {
        (segment.tokens.len() - 1, 0)
    }

    fn loss(&self, model: &LanguageModel, batch: &[&Segment], smoothing: f64, device: &Device) -> Result<Loss> {
        Ok(read(model, batch, smoothing, device, None)?.0)
    }

    fn learn(
        &self,
        model: &LanguageModel,
        batch: &[&Segment],
        smoothing: f64,
        device: &Device,
    ) -> Result<(Loss, Option<LanguageState>)> {
        read(model, batch, smoothing, device, self.peers.as_ref())
    }

    fn split_among(&mut self, peers: Arc<dyn Peers>) {
        self.peers = Some(peers);
    }

    fn carry(&self, feed: &mut Lanes, carried: Vec<LanguageState>) -> Result<()> {
        feed.carry(&carried)
    }

    fn place(&self, feed: &Lanes, model: &LanguageModel, others: Vec<Place>) -> Result<Place> {
        feed.place(model, others)
    }

    fn return_to(&self, feed: &mut Lanes, model: &LanguageModel, place: Place) -> Result<()> {
        feed.return_to(model, place)
    }

    fn usual_steps(per_epoch: usize) -> usize {
        (10 * per_epoch).clamp(200, 2000)
    }

    fn usual_dropout(&self, passes: f64) -> Option<f64> {
        // Characters and bytes are harder to learn by heart (docs/tried.md).
        let each = if matches!(*self.tokenizer, Tokenizer::Json { .. }) { 0.02 } else { 0.005 };
        Some((each * passes.min(10.0) * 1000.0).round() / 1000.0)
    }

    fn score(&self, model: &LanguageModel, passages: &[Passage], how: &Answering<'_>) -> Result<BitsPerByte> {
        // As many stretches on any number of threads, each from a beginning, and added in their order.
        let stretches: Vec<&[Passage]> = passages.chunks(passages.len().div_ceil(STRETCHES).max(1)).collect();
        let mut cost = Cost::default();
        let parts = how.workers.each(&stretches, |part| self.read_all(model, part, how.config))?;
        parts.into_iter().for_each(|part| cost.add(part));
        Ok(cost.result())
    }

    fn scoring(data: &Data<Self>, config: &Config) -> Result<f64> {
        let passages = data.scored(config);
        let Some(Passage { corpus, .. }) = passages.first() else { return Ok(0.0) };
        let learned = Parts::of(corpus, config)?.train;
        let bytes_per_token = (learned.end - learned.start) as f64 / data.train.tokens().max(1.0);
        let development: usize = data.development.iter().map(|stretch| stretch.tokens.len()).sum();
        Ok(size(&passages) as f64 / bytes_per_token / development.max(1) as f64)
    }

    fn simple(&self, _: &Data<Self>, passages: &[Passage], config: &Config) -> Result<Vec<Simple>> {
        let Some(Passage { corpus, .. }) = passages.first() else { return Ok(Vec::new()) };
        let Range { start, end } = Parts::of(corpus, config)?.train;
        let from = corpus.boundary(start.max(end.saturating_sub(LEARNED)))?;
        let read = end.saturating_sub(from) + size(passages);
        let room = (PPMD_MEMORY * read).clamp(1 << 20, PPMD_MEMORY * LEARNED) as u32;
        let mut ppmd = Ppmd7Encoder::new(Count(0), PPMD_ORDER, room)?;
        for piece in corpus.pieces(from.min(end)..end) {
            ppmd.write_all(&piece?.bytes)?;
        }
        let learned = ppmd.get_ref().0;
        for Passage { corpus, from, to } in passages {
            for piece in corpus.pieces(*from..*to) {
                ppmd.write_all(&piece?.bytes)?;
            }
        }
        let score = 8.0 * (ppmd.get_ref().0 - learned) as f64 / size(passages).max(1) as f64;
        let some = if from > start { format!(" of the last {}", memory::size(LEARNED as f64)) } else { String::new() };
        let name = format!("PPMd of order {PPMD_ORDER}{some}");
        Ok(vec![Simple { name, shown: format!("{score:.3} bits per byte"), score }])
    }

    fn evaluate(&self, model: &LanguageModel, path: &Path, how: &Answering<'_>) -> Result<BitsPerByte> {
        let corpus = Arc::new(Corpus::open(&[path.to_path_buf()], !matches!(*self.tokenizer, Tokenizer::Bytes))?);
        let to = corpus.len();
        Ok(self.read_all(model, &[Passage { corpus, from: 0, to }], how.config)?.result())
    }

    fn show(&self, model: &LanguageModel, _: &[Passage], how: &Answering<'_>, folder: &str) -> Result<Shown> {
        let sample = SampleOptions { temperature: 0.8, ..SampleOptions::default() };
        let wish = Wish { prompt: "", tokens: Some(240), sample, seed: how.config.training.seed, may_end: true };
        let mut text = String::new();
        self.generate(model, how.config, &wish, &mut |piece| {
            text.push_str(piece);
            Ok(true)
        })?;
        let text = text.lines().map(|line| format!("  {}\n", visible(line))).collect();
        let next = format!("{} generate {folder} --prompt 'And '", shell::program());
        Ok(Shown { text, next, picture: None })
    }

    fn introduce(&self, config: &Config, data: &Data<Self>) -> String {
        let corpus = data.held_out.first().map_or(0.0, |passage| passage.corpus.len() as f64);
        let texts = data.held_out.first().map_or(1, |passage| passage.corpus.documents());
        let texts = if texts == 1 { String::new() } else { format!(" in {texts} texts") };
        format!(
            "{}: {}{texts}, of which the last {} are held out; {} ({} tokens, 4 of them special)",
            config.data_name(),
            memory::size(corpus),
            memory::size(size(&data.held_out) as f64),
            if config.task.tokens.as_deref() == Some("bpe") { "byte-pair encoding" } else { self.tokenizer.kind() },
            self.tokenizer.len()
        )
    }

    fn unknown_pieces(&self, text: &str) -> Vec<String> {
        self.tokenizer.unknown(text)
    }
}

impl Text {
    /// Goes on with a text: hands the pieces to `out` as they come, until `out` gives `false`.
    pub fn generate(
        &self,
        model: &LanguageModel,
        config: &Config,
        wish: &Wish<'_>,
        out: &mut dyn FnMut(&str) -> Result<bool>,
    ) -> Result<Generated> {
        continuation::generate(model, &self.tokenizer, model::limit(config), wish, out)
    }

    fn divide(
        &self,
        corpus: &Arc<Corpus>,
        parts: &Parts,
        held_out: Vec<Passage>,
        sha256: String,
        config: &Config,
    ) -> Result<Data<Self>> {
        let train = Lanes::new(corpus, &self.tokenizer, &parts.train, config)?;
        let mut tokens = Vec::new();
        for piece in corpus.pieces(parts.development.clone()) {
            let piece = piece?;
            tokens.extend(self.tokenizer.encode_piece(&piece.before, &piece.bytes)?);
            if tokens.len() >= DEVELOPMENT {
                break;
            }
        }
        tokens.truncate(DEVELOPMENT);
        let stretch = STRETCH.min(config.task.segment * config.task.carry);
        let stretches = tokens.chunks(stretch + 1).filter(|stretch| stretch.len() > 1);
        let cut = config.task.segment;
        let development = stretches.map(|stretch| Segment { tokens: stretch.to_vec(), state: None, cut }).collect();
        Ok(Data { train, development, held_out, too_long: 0, longest: 0, sha256 })
    }

    /// What passages cost. The state is carried from one to the next where they follow each other.
    fn read_all(&self, model: &LanguageModel, passages: &[Passage], config: &Config) -> Result<Cost> {
        let mut scorer = Scorer::new(model, &self.tokenizer, model::limit(config));
        let mut end = None;
        for Passage { corpus, from, to } in passages {
            if end.replace(*to) != Some(*from) {
                scorer.begin();
            }
            for piece in corpus.pieces(*from..*to) {
                scorer.read(&piece?)?;
            }
        }
        Ok(scorer.cost)
    }
}

/// Says it where a text begins with special tokens of a tokenizer.json, which are learned and never printed.
fn say_hidden(tokenizer: &Tokenizer, corpus: &Corpus, train: &Range<u64>, config: &Config) -> Result<()> {
    let Tokenizer::Json { .. } = tokenizer else { return Ok(()) };
    let first = corpus.piece(train.start, train.end)?;
    let ids = tokenizer.encode_piece(&first.before, &first.bytes)?;
    let hidden = ids.iter().filter(|&&id| id >= SPECIALS && tokenizer.is_hidden(id)).count();
    if hidden > 0 {
        note(format_args!(
            "{}: {hidden} of the first {} are special tokens of the tokenizer, which generated text does not show",
            config.data_name(),
            counted(ids.len(), "tokens")
        ));
    }
    Ok(())
}

fn size(passages: &[Passage]) -> u64 {
    passages.iter().map(|passage| passage.to - passage.from).sum()
}

struct Count(usize);

impl Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a corpus from its beginning to its end: the passages that are held out, and the SHA-256 of all. `train` takes the bytes to
/// learn from. Says how much of the passages that are scored stands among them.
fn read_once(
    corpus: &Arc<Corpus>,
    parts: &Parts,
    config: &Config,
    mut train: impl FnMut(&[u8]),
) -> Result<(Vec<Passage>, String)> {
    let mut passages = Vec::new();
    let Range { start: mut at, end } = parts.held_out;
    while at < end {
        let to = corpus.boundary(end.min(at + PASSAGE))?.min(end);
        passages.push(Passage { corpus: corpus.clone(), from: at, to });
        at = to;
    }
    let mut overlap = Overlap::of(&evenly(&passages, config.training.scored()))?;
    let sha256 = corpus.scan(|at, piece| {
        // The piece at the border goes on beyond it.
        let count = parts.train.end.saturating_sub(at).min(piece.bytes.len() as u64);
        let bytes = &piece.bytes[..count as usize];
        overlap.learn(bytes);
        train(bytes);
    })?;
    overlap.say(&config.data_name());
    Ok((passages, sha256))
}

/// The loss of segments and the state after them; with peers, this process's part of the loss.
fn read(
    model: &LanguageModel,
    batch: &[&Segment],
    smoothing: f64,
    device: &Device,
    peers: Option<&Arc<dyn Peers>>,
) -> Result<(Loss, Option<LanguageState>)> {
    let states: Vec<&LanguageState> = batch.iter().filter_map(|segment| segment.state.as_ref()).collect();
    let mut state = LanguageState::join(&states)?;
    let longest = batch.iter().map(|segment| segment.tokens.len() - 1).max().unwrap_or(0);
    let cut = batch.iter().map(|segment| segment.cut).max().unwrap_or(1);
    let mut sum: Option<CrossEntropyLoss> = None;
    for from in (0..longest).step_by(cut) {
        let to = longest.min(from + cut);
        let at = |place: usize| batch.iter().flat_map(move |s| (from..to).map(move |t| s.tokens.get(t + place)));
        let ids: Vec<i32> = at(0).map(|token| token.map_or(END as i32, |&token| token as i32)).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [batch.len(), to - from]), device);
        let next: Vec<Option<u32>> = at(1).map(Option::<&u32>::copied).collect();
        let loss = match peers {
            None => model.loss_from(ids, next, smoothing, &mut state)?,
            Some(peers) => model.loss_over(ids, &next, smoothing, &mut state, peers)?,
        };
        sum = Some(match sum {
            None => loss,
            Some(sum) => CrossEntropyLoss { plain: sum.plain + loss.plain, smoothed: sum.smoothed + loss.smoothed },
        });
    }
    match sum {
        Some(CrossEntropyLoss { plain, smoothed }) => Ok((Loss { plain, smoothed }, Some(state))),
        None => bail!("a batch without tokens; this is a bug: report it"),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Chosen {
    Known(Kind),
    Learned(usize),
}

/// The least and the most entries of a byte-pair encoding that nobody gave a size.
const ENTRIES: [u64; 2] = [1024, 8192];

/// Bytes of text for each of them.
const BYTES_PER_ENTRY: u64 = 256;

/// What the settings say. If nothing, a byte-pair encoding, whose steps read more of the text, and characters of a short text, in which
/// pairs are too rare to learn.
fn kind(config: &Config, bytes: u64) -> Result<Chosen> {
    let [least, most] = ENTRIES;
    // A power of two, so that a few bytes more change nothing.
    let entries = 1 << (bytes / BYTES_PER_ENTRY).clamp(least, most).ilog2();
    let learned = |size: usize| {
        if size < 257 {
            bail!(
                "vocabulary = {size}: expected at least 257, one more than there are bytes; raise it with --vocabulary"
            );
        }
        Ok(Chosen::Learned(size))
    };
    match (config.task.tokens.as_deref(), config.task.vocabulary) {
        (Some("bpe") | None, Some(size)) => learned(size),
        (Some("bpe"), None) => learned(entries),
        (Some(other), Some(_)) => bail!("--vocabulary goes with --tokens bpe, not with {other}; leave one of them out"),
        (None, None) if bytes < least * BYTES_PER_ENTRY => Ok(Chosen::Known(Kind::Characters)),
        (None, None) => learned(entries),
        (Some("words"), None) => {
            bail!("words do not keep the space between them; choose characters, bytes, bpe, or a tokenizer.json")
        }
        (Some(name), None) => match name.parse() {
            Ok(kind) => Ok(Chosen::Known(kind)),
            Err(_) => {
                bail!("unknown tokens {name:?}; known are characters, bytes, bpe, or the path of a tokenizer.json")
            }
        },
    }
}

/// A byte-pair encoding of the training text, or of its beginning where it is very long.
fn learned(corpus: &Corpus, train: &Range<u64>, size: usize) -> Result<Tokenizer> {
    let end = train.end.min(train.start + LEARNED_FROM);
    let mut failure = None;
    let texts = corpus.pieces(train.start..end).map_while(|piece| {
        let piece = piece.map_err(|error| failure = Some(error)).ok()?;
        Some(String::from_utf8_lossy(&piece.bytes).into_owned())
    });
    let tokenizer = Tokenizer::train(size, texts)?;
    failure.map_or(Ok(tokenizer), Err)
}

/// Which bytes serve what, by position: the last twentieth is held out, that before is for development.
struct Parts {
    train: Range<u64>,
    development: Range<u64>,
    held_out: Range<u64>,
}

impl Parts {
    fn of(corpus: &Corpus, config: &Config) -> Result<Self> {
        let all = corpus.len();
        if all < LEAST {
            bail!("{}: {all} bytes are too little to learn from; give at least {LEAST}", config.data_name());
        }
        let [first, second] = [all - all / 10, all - all / 20].map(|at| corpus.boundary_below(at, all));
        let (first, second) = (first?, second?);
        Ok(Self { train: 0..first, development: first..second, held_out: second..all })
    }
}
