//! A bag of words and pairs of neighbouring words, hashed, and logistic or ridge regression on it.

use anyhow::Result;
use rayon::prelude::*;
use safetensors::tensor::Dtype;
use std::collections::HashMap;

use super::linear::{Loss, Rows};
use super::{FOLDS, bytes, load, numbers, scaled, store};
use crate::run::folder::RunFolder;
use crate::tasks::labels::Goal;
use crate::tasks::split;

const PENALTIES: [f64; 3] = [1.0, 8.0, 64.0];

/// Products of a number and a weight in one pass of all fits; beyond it one penalty is tried.
const MUCH: usize = 100_000_000;

/// Bytes of text that are learned from; of more, texts from all over.
const MOST: usize = 100 << 20;

/// What a bag tells of a text: a logit for each label, or a number.
#[derive(Debug, PartialEq)]
pub struct Bag {
    /// Of words and pairs that came in two texts at least: their hash, and its place among the others.
    places: HashMap<u32, u32>,
    /// How rare each is, and its weight for each output; after them the constants.
    pub rarity: Vec<f32>,
    weights: Vec<f32>,
    outputs: usize,
}

/// Words and pairs of a text and how often each comes, in the order of their hashes. Letters and digits in a row are a word, but each of scripts that
/// write no spaces; other signs are words too, the same one in a row one.
fn features(text: &str) -> Vec<(u32, f32)> {
    let mut words: Vec<String> = Vec::new();
    let mut before = ' ';
    for c in text.chars() {
        let alone = !c.is_alphanumeric() || c >= '\u{2e80}';
        if c.is_alphanumeric() && !alone && before.is_alphanumeric() && before < '\u{2e80}' {
            words.last_mut().expect("the word of the letter before").extend(c.to_lowercase());
        } else if !(c.is_whitespace() || c == before && !c.is_alphanumeric()) {
            words.push(c.to_lowercase().collect());
        }
        before = c;
    }
    let pairs = words.windows(2).map(|pair| split::hash(&pair.join(" ")));
    let mut hashes: Vec<u32> =
        words.iter().map(|word| split::hash(word)).chain(pairs).map(|hash| hash as u32).collect();
    hashes.sort_unstable();
    hashes.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as f32)).collect()
}

impl Bag {
    /// Learns from texts, and what is predicted of each by a bag that has not learned from it.
    pub fn fit(texts: &[&str], goals: &[Goal], outputs: usize) -> (Self, Vec<Vec<f32>>) {
        let bytes: usize = texts.iter().map(|text| text.len()).sum();
        let stride = bytes.div_ceil(MOST).max(1);
        let learned: Vec<usize> = (0..texts.len()).step_by(stride).collect();
        let counted: Vec<Vec<(u32, f32)>> = texts.par_iter().map(|text| features(text)).collect();
        let mut frequency: HashMap<u32, u32> = HashMap::new();
        learned.iter().flat_map(|&n| &counted[n]).for_each(|(hash, _)| *frequency.entry(*hash).or_default() += 1);
        let mut kept: Vec<(u32, u32)> = frequency.into_iter().filter(|(_, count)| *count > 1).collect();
        kept.sort_unstable();
        let rarity =
            kept.iter().map(|(_, count)| (((1 + learned.len()) as f32) / (1 + count) as f32).ln() + 1.0).collect();
        let places = kept.iter().zip(0..).map(|((hash, _), place)| (*hash, place)).collect();
        let mut bag = Self { places, rarity, weights: Vec::new(), outputs };
        let mut rows = Rows::new(kept.len());
        counted.iter().for_each(|one| rows.push(bag.row(one).into_iter()));

        // Of two labels one problem tells both.
        let problems = if outputs == 2 { 1 } else { outputs };
        let loss = if let Some(Goal::Number(_)) = goals.first() { Loss::Squared } else { Loss::Logistic };
        let targets = |problem: usize| -> Vec<f64> {
            let of = |goal: &Goal| match *goal {
                Goal::Number(number) => f64::from(number),
                Goal::Label(label) if label as usize == if outputs == 2 { 1 } else { problem } => 1.0,
                Goal::Label(_) => -1.0,
            };
            goals.iter().map(of).collect()
        };
        let targets: Vec<Vec<f64>> = (0..problems).map(targets).collect();
        let spread = |row: Vec<f64>| -> Vec<f32> {
            let row = if outputs == 2 { vec![-row[0] / 2.0, row[0] / 2.0] } else { row };
            row.into_iter().map(|x| x as f32).collect()
        };
        let fit = |problem: usize, left_out: usize, penalty: f64| {
            let which: Vec<usize> = learned.iter().copied().filter(|n| n % FOLDS != left_out).collect();
            rows.fit(&which, &targets[problem], penalty, loss)
        };
        // Each text by the weights of the folds without it.
        let unseen = |penalty: f64| -> Vec<Vec<f32>> {
            let jobs: Vec<(usize, usize)> =
                (0..FOLDS).flat_map(|fold| (0..problems).map(move |problem| (fold, problem))).collect();
            let fitted: Vec<Vec<f64>> =
                jobs.into_par_iter().map(|(fold, problem)| fit(problem, fold, penalty)).collect();
            (0..texts.len())
                .map(|n| {
                    spread(
                        (0..problems).map(|problem| rows.times(n, &fitted[n % FOLDS * problems + problem])).collect(),
                    )
                })
                .collect()
        };
        let tried = if rows.count() * problems > MUCH { &PENALTIES[1..2] } else { &PENALTIES[..] };
        let best = tried.iter().map(|&penalty| {
            let found = unseen(penalty);
            let (scale, loss) = scaled(&found, goals);
            (penalty, scale, loss, found)
        });
        let (penalty, scale, _, mut found) = best.min_by(|a, b| a.2.total_cmp(&b.2)).expect("a penalty is tried");
        found.iter_mut().flatten().for_each(|x| *x *= scale as f32);
        let all: Vec<Vec<f64>> = (0..problems).into_par_iter().map(|problem| fit(problem, FOLDS, penalty)).collect();
        bag.weights = (0..=kept.len())
            .flat_map(|place| spread(all.iter().map(|weights| scale * weights[place]).collect()))
            .collect();
        (bag, found)
    }

    /// Columns and values of a text: by how often and how rare, of length 1.
    fn row(&self, counted: &[(u32, f32)]) -> Vec<(u32, f32)> {
        let known = counted.iter().filter_map(|(hash, count)| Some((*self.places.get(hash)?, 1.0 + count.ln())));
        let mut row: Vec<(u32, f32)> =
            known.map(|(place, count)| (place, count * self.rarity[place as usize])).collect();
        let norm = row.iter().map(|(_, value)| value * value).sum::<f32>().sqrt();
        row.iter_mut().for_each(|(_, value)| *value /= norm);
        row
    }

    pub fn predict(&self, text: &str) -> Vec<f32> {
        let of = |place: usize| &self.weights[place * self.outputs..(place + 1) * self.outputs];
        let mut found = of(self.rarity.len()).to_vec();
        // Letters with marks may be composed or decomposed; of several spellings with as many known words it is read as it stands.
        let rows = split::spellings(text).into_iter().rev().map(|text| self.row(&features(&text)));
        for (place, value) in rows.max_by_key(Vec::len).unwrap_or_default() {
            found.iter_mut().zip(of(place as usize)).for_each(|(sum, weight)| *sum += value * weight);
        }
        found
    }

    pub fn store(&self, folder: &RunFolder, file: &str) -> Result<()> {
        let mut hashes: Vec<(u32, u32)> = self.places.iter().map(|(hash, place)| (*place, *hash)).collect();
        hashes.sort_unstable();
        let hashes = hashes.iter().flat_map(|(_, hash)| hash.to_le_bytes()).collect();
        store(
            folder,
            file,
            &[
                ("hashes", Dtype::U32, hashes),
                ("rarity", Dtype::F32, bytes(&self.rarity)),
                ("weights", Dtype::F32, bytes(&self.weights)),
            ],
        )
    }

    /// Reads what [`store`](Self::store) wrote, of so many outputs.
    pub fn load(folder: &RunFolder, file: &str, outputs: usize) -> Result<Self> {
        let [hashes, rarity, weights] = load(folder, file, ["hashes", "rarity", "weights"])?;
        if rarity.len() != hashes.len() || weights.len() != (hashes.len() + 1) * outputs {
            return Err(folder.damaged(file, "not what a run writes"));
        }
        let places = hashes.iter().zip(0..).map(|(hash, place)| (u32::from_le_bytes(*hash), place)).collect();
        Ok(Self { places, rarity: numbers(&rarity), weights: numbers(&weights), outputs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_pairs_signs_and_scripts_without_spaces_are_counted() {
        let hashes = |words: &[&str]| {
            let mut hashes: Vec<u32> = words.iter().map(|word| split::hash(word) as u32).collect();
            hashes.sort_unstable();
            hashes
        };
        let found = |text: &str| features(text).into_iter().map(|(hash, _)| hash).collect::<Vec<_>>();
        assert_eq!(found("So, SO 2nd"), hashes(&["so", ",", "2nd", "so ,", ", so", "so 2nd"]));
        assert_eq!(found("free!!!"), hashes(&["free", "!", "free !"]));
        assert_eq!(found("天天好"), hashes(&["天", "好", "天 天", "天 好"]));
        assert_eq!(features("a a a").iter().find(|(hash, _)| *hash == split::hash("a") as u32).unwrap().1, 3.0);
        assert_eq!(features(" \n"), []);
    }

    #[test]
    fn a_bag_learns_pairs_and_says_of_each_text_what_others_teach() {
        let words = ["red", "green", "blue", "old"];
        let texts: Vec<String> =
            (0..200).map(|n| format!("{} not {} {}", words[n % 4], words[n / 4 % 4], words[n / 16 % 4])).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        // Which word comes after "not" is known by pairs alone.
        for outputs in [2, 3] {
            let goals: Vec<Goal> = (0..200).map(|n| Goal::Label((n / 4 % 4 % outputs) as u32)).collect();
            let (bag, unseen) = Bag::fit(&texts, &goals, outputs);
            let right = |row: &[f32], goal: &Goal| Goal::Label(crate::tasks::scores::likeliest(row) as u32) == *goal;
            assert!(unseen.iter().zip(&goals).all(|(row, goal)| right(row, goal)));
            assert!(texts.iter().zip(&goals).all(|(text, goal)| right(&bag.predict(text), goal)));
            let place = tempfile::tempdir().unwrap();
            let folder = RunFolder::at(place.path(), false);
            bag.store(&folder, "bag").unwrap();
            assert_eq!(Bag::load(&folder, "bag", outputs).unwrap(), bag);
            assert!(Bag::load(&folder, "bag", outputs + 1).unwrap_err().to_string().contains("damaged"));
        }
        let goals: Vec<Goal> = (0..200).map(|n| Goal::Number((n / 4 % 4) as f32 - 1.5)).collect();
        let (bag, unseen) = Bag::fit(&texts, &goals, 1);
        let near = |x: f32, goal: &Goal| matches!(goal, Goal::Number(y) if (x - y).abs() < 0.3);
        assert!(unseen.iter().zip(&goals).all(|(row, goal)| near(row[0], goal)), "{unseen:?}");
        assert!(near(bag.predict("old not red old")[0], &Goal::Number(-1.5)));
        // Labels that follow nothing: no text is told by its own.
        let goals: Vec<Goal> = (0..200u32).map(|n| Goal::Label(n.wrapping_mul(2_654_435_761) >> 31)).collect();
        let wrong = Bag::fit(&texts, &goals, 2).1;
        let right = wrong
            .iter()
            .zip(&goals)
            .filter(|(row, goal)| Goal::Label(crate::tasks::scores::likeliest(row) as u32) == **goal)
            .count();
        assert!((60..140).contains(&right), "{right} of 200");
    }
}
