//! Pairs of texts, learned by a sequence-to-sequence transformer: a person's own, or words and their pronunciations.

mod answers;
mod cmudict;
mod example;
pub mod file;
mod model;

use std::path::Path;

use anyhow::Result;
use burn::tensor::Device;
use longspan::layers::CrossEntropyLoss;
use longspan::models::Seq2Seq;
use sha2::Digest;

use super::batches::padded;
use super::feed::{self, DEVELOPMENT, Shuffled};
use super::lines;
use super::memory;
use super::scores::ErrorRates;
use super::split::{self, Split, evenly};
use super::table::columns::TextColumn;
use super::task::{self, Answer, Asked, Data, Loss, Predict, Shown, Task, Titles, Told, Vocabulary};
use super::tokens::{END, Kind, START, Tokenizer};
use super::workers::Workers;
use crate::run::columns::Columns;
use crate::run::config::{self, PairsSettings};
use crate::run::folder::RunFolder;
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::counted;
use example::{Example, Pair, source_ids};

type Config = config::Config<PairsSettings>;
type Answering<'a> = task::Answering<'a, PairsSettings>;

/// Tokens of development examples, where they are long: a checkpoint should wait a second for them, not a minute.
const DEVELOPMENT_TOKENS: usize = 100_000;

pub struct Pairs {
    source: Tokenizer,
    target: Tokenizer,
}

const SIDES: [&str; 2] = ["source", "target"];

impl Task for Pairs {
    type Example = Pair;
    type Feed = Shuffled<Pair>;
    type Carried = ();
    type Text = Example;
    type Model = Seq2Seq;
    type Scores = ErrorRates;
    type Settings = PairsSettings;

    fn begin(config: &mut Config) -> Result<(Self, Data<Self>)> {
        let (split, columns) = read_split(config)?;
        config.task.files.columns = columns;
        let task = Self::build(config, &split)?;
        task.say_lost(&split)?;
        let data = task.encode(split, config)?;
        config.task.source_tokens.get_or_insert(task.source.kind().into());
        config.task.target_tokens.get_or_insert(task.target.kind().into());
        let longest = data.train.examples.iter().map(|pair| pair.target.len()).max().unwrap_or(0);
        config.task.answer_tokens.get_or_insert((longest * 5).div_ceil(4).max(1));
        Ok((task, data))
    }

    fn load(folder: &RunFolder, _: &Config) -> Result<Self> {
        let [source, target] = SIDES.map(|side| Tokenizer::load(folder, side));
        Ok(Self { source: source?, target: target? })
    }

    fn store(&self, folder: &RunFolder) -> Result<()> {
        SIDES.into_iter().zip([&self.source, &self.target]).try_for_each(|(side, one)| one.store(folder, side))
    }

    fn data(&self, config: &Config) -> Result<Data<Self>> {
        self.encode(read_split(config)?.0, config)
    }

    fn vocabularies(&self) -> Vec<Vocabulary> {
        let sides = SIDES.into_iter().zip([&self.source, &self.target]);
        sides.map(|(side, t)| Vocabulary { side, kind: t.kind(), size: t.len() }).collect()
    }

    fn model(&self, config: &Config, device: &Device) -> Result<Seq2Seq> {
        model::model(config, &model::configure(config, self.source.len(), self.target.len())?, device)
    }

    fn size(pair: &Pair) -> (usize, usize) {
        (pair.predicted(), pair.source.len())
    }

    fn loss(&self, model: &Seq2Seq, batch: &[&Pair], smoothing: f64, device: &Device) -> Result<Loss> {
        let sources: Vec<Vec<u32>> = batch.iter().map(|pair| source_ids(&pair.source)).collect();
        let inputs: Vec<Vec<u32>> = batch.iter().map(|pair| [&[START], pair.target.as_slice()].concat()).collect();
        let labels: Vec<Vec<u32>> = batch.iter().map(|pair| [pair.target.as_slice(), &[END]].concat()).collect();
        let (source, source_lengths) = padded(&sources, device);
        let (input, lengths) = padded(&inputs, device);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let next: Vec<_> = labels.iter().flat_map(|labels| (0..longest).map(|at| labels.get(at).copied())).collect();
        let CrossEntropyLoss { plain, smoothed } = model.loss(source, &source_lengths, input, next, smoothing)?;
        Ok(Loss { plain, smoothed })
    }

    fn usual_steps(per_epoch: usize) -> usize {
        6000.min((45 * per_epoch).max(750))
    }

    fn usual_dropout(&self, passes: f64) -> Option<f64> {
        Some((passes - 5.0).clamp(0.0, 15.0).round() / 100.0)
    }

    fn score(&self, model: &Seq2Seq, examples: &[Example], how: &Answering<'_>) -> Result<ErrorRates> {
        let texts: Vec<&str> = examples.iter().map(|example| example.source.as_str()).collect();
        let line = |place: usize| examples[place].lines[0];
        let hypotheses =
            answers::search(model, [&self.source, &self.target], &texts, &Answering { line: &line, ..*how })?;
        let cut = hypotheses.iter().flat_map(|all| all.first()).filter(|first| !first.finished).count();
        note_some(cut, |cut| {
            let (cut, limit) = (counted(cut, "answers"), how.config.common().longest_answer.unwrap_or_default());
            format!("{}: {cut} did not end within {limit} tokens, cut there", how.name)
        });
        let scores = answers::score(&self.target, examples, &hypotheses, how.name)?;
        let units = if how.config.data.is_empty() { ["word", "phoneme"] } else { ["sequence", "token"] };
        Ok(ErrorRates::of(&scores, units))
    }

    fn evaluate(&self, model: &Seq2Seq, path: &Path, how: &Answering<'_>) -> Result<ErrorRates> {
        self.score(model, &file::read(path, &how.config.task.files.columns)?.0, how)
    }

    fn show(&self, model: &Seq2Seq, held_out: &[Example], how: &Answering<'_>, folder: &str) -> Result<Shown> {
        let wanted = if how.config.data.is_empty() {
            ["longspan", "transformer", "linear", "attention", "kernel", "rust"]
                .map(|word| (word.into(), None))
                .to_vec()
        } else {
            let first = held_out.iter().take(6);
            first.map(|example| (example.source.clone(), example.targets.first().cloned())).collect()
        };
        task::sampled(wanted, |texts| self.answer(model, texts, how), folder)
    }

    fn introduce(&self, config: &Config, data: &Data<Self>) -> String {
        let kinds: Vec<&str> = self.vocabularies().iter().map(|vocabulary| vocabulary.kind).collect();
        format!(
            "{}: {} training examples, {} held out; {}",
            config.data_name(),
            data.train.examples.len(),
            data.held_out.len(),
            kinds.join(" → ")
        )
    }

    fn blocks(config: &Config) -> String {
        format!("{}+{} blocks", config.task.encoder_layers, config.task.decoder_layers)
    }

    fn unknown_pieces(&self, text: &str) -> Vec<String> {
        self.source.unknown(text)
    }
}

impl Predict for Pairs {
    fn asked(&self, path: &Path, config: &Config) -> Result<Option<Vec<Asked>>> {
        file::SOURCE.asked(path, config.task.files.columns.source.as_ref())
    }

    fn titles(&self, config: &Config) -> Titles {
        let named = |name: &Option<String>, column: &TextColumn| vec![name.clone().unwrap_or(column.key.into())];
        let columns = &config.task.files.columns;
        Titles {
            key: named(&columns.source, &file::SOURCE),
            answer: named(&columns.target, &file::TARGET),
            always: false,
        }
    }

    fn predict(&self, model: &Seq2Seq, asked: &[Asked], how: &Answering<'_>) -> Result<Vec<Told>> {
        task::answered(asked, |texts| self.answer(model, texts, how), task::likeliest)
    }
}

/// The pairs by their use, and what the columns of the main file are called.
fn read_split(config: &Config) -> Result<(Split<Example>, Columns)> {
    let (all, columns) = match config.first() {
        Some(path) => file::read(path, &config.task.files.columns)?,
        None => (cmudict::examples()?, Columns::default()),
    };
    let read = |path: &Path| Ok(file::read(path, &columns)?.0);
    let split = split::of(&config.task.files, &config.data_name(), all, "pairs", read, |one| &one.source)?;
    Ok((split, columns))
}

impl Pairs {
    fn answer(&self, model: &Seq2Seq, texts: &[&str], how: &Answering<'_>) -> Result<Vec<Vec<Answer>>> {
        let hypotheses = answers::search(model, [&self.source, &self.target], texts, how)?;
        hypotheses.iter().map(|beam| answers::to_texts(&self.target, beam)).collect()
    }

    /// Tokenizers for the training examples, of the kinds that the settings name.
    fn build(config: &Config, split: &Split<Example>) -> Result<Self> {
        let kind = |name: &Option<String>, default: Kind| name.as_ref().map_or(Ok(default), |name| name.parse());
        let target_default = if config.data.is_empty() { Kind::Words } else { Kind::Characters };
        let source_kind = kind(&config.task.source_tokens, Kind::Characters)?;
        let target_kind = kind(&config.task.target_tokens, target_default)?;
        let sources = split.train.iter().map(|example| example.source.as_str());
        let targets = split.train.iter().flat_map(|example| &example.targets).map(String::as_str);
        Ok(Self { source: Tokenizer::build(&source_kind, sources)?, target: Tokenizer::build(&target_kind, targets)? })
    }

    /// Says it where the target's tokenizer does not give targets back as they are: answers cannot print them.
    fn say_lost(&self, split: &Split<Example>) -> Result<()> {
        const TRIED: usize = 1000;
        let Tokenizer::Json { .. } = self.target else { return Ok(()) };
        let all: Vec<&String> = split.train.iter().chain(&split.held_out).flat_map(|one| &one.targets).collect();
        let tried = evenly(&all, TRIED);
        let mut lost = Vec::new();
        for &target in &tried {
            // What it cannot encode is an error with its line, later.
            let Ok(ids) = self.target.encode(target) else { return Ok(()) };
            let printed = self.target.decode(&ids)?;
            if printed != *target {
                lost.push((target, printed));
            }
        }
        if let [(target, printed), ..] = lost.as_slice() {
            note(format_args!(
                "the tokenizer of the targets does not give back {} of {} targets as they are: {target:?} is printed as {printed:?}; \
                 special tokens are never printed, and answers with them count as wrong",
                lost.len(),
                tried.len()
            ));
        }
        Ok(())
    }

    fn encode(&self, split: Split<Example>, config: &Config) -> Result<Data<Self>> {
        let tokens = |pair: &Pair| pair.source.len().max(pair.target.len());
        let train = self.ids(&split.train, &config.data_name())?;
        let mut development = self.ids(&split.development, &config.scored_names()[0])?;
        development.retain(|pair| tokens(pair) <= config.task.files.max_tokens);
        let mut total = 0;
        let few = development.iter().take(DEVELOPMENT).take_while(|pair| {
            total += Self::size(pair).0 + Self::size(pair).1;
            total <= DEVELOPMENT_TOKENS
        });
        // One at least: without development examples nothing warns of overfitting.
        let few = few.count().max(1);
        development.truncate(few);
        let data: Data<Self> = feed::data(
            train,
            development,
            split.held_out,
            config,
            tokens,
            |Pair { source, target }, hash| {
                for ids in [source, target] {
                    hash.update((ids.len() as u64).to_le_bytes());
                    ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
                }
            },
            |one: &Example| one.targets.iter().chain([&one.source]).map(String::as_str).collect(),
        )?;
        check_memory(data.train.examples.iter().chain(&data.development), config)?;
        Ok(data)
    }

    /// Examples as ids; `name` says where they come from.
    fn ids(&self, examples: &[Example], name: &str) -> Result<Vec<Pair>> {
        let mut pairs = Vec::new();
        for example in examples {
            let source = self.source.encode(&example.source).map_err(lines::in_line(name, example.lines[0]))?;
            for (text, &line) in example.targets.iter().zip(&example.lines) {
                let target = self.target.encode(text).map_err(lines::in_line(name, line))?;
                pairs.push(Pair { source: source.clone(), target });
            }
        }
        Ok(pairs)
    }
}

/// Refuses pairs that the memory has no room for. All workers may have a long one at the same time.
fn check_memory<'a>(pairs: impl Iterator<Item = &'a Pair>, config: &Config) -> Result<()> {
    let [source, target] = model::training_bytes(config);
    let bytes = |pair: &Pair| source * pair.source.len() as f64 + target * pair.target.len() as f64;
    let Some(largest) = pairs.max_by(|a, b| bytes(a).total_cmp(&bytes(b))) else { return Ok(()) };
    let workers = config.training.workers.unwrap_or(Workers::usual_count()) as f64;
    let what = || format!("training on pairs of {} and {} tokens", largest.source.len(), largest.target.len());
    let room = (memory::available() / workers / (source + target)) as usize;
    if room == 0 {
        // The model is refused for its own size.
        return Ok(());
    }
    let help = format!("leave longer ones out with --set max_tokens={room}, or lower workers, d_model or d_ff");
    memory::check(workers * bytes(largest), what, &help)
}
