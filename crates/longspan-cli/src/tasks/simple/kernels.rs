//! Convolutions of series with fixed kernels of many dilations, pooled (MiniRocket; Dempster, Schmidt and Webb 2021), and ridge regression on what
//! they give.

use anyhow::Result;
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::ridge::ridge;
use super::{bytes, load, numbers, store};
use crate::run::folder::RunFolder;
use crate::tasks::batches::Random;
use crate::tasks::labels::Goal;
use crate::tasks::split::evenly;

/// Taps of a kernel, three of which weigh 2 and the others −1.
const TAPS: usize = 9;

/// Ways to choose these three.
const KERNELS: usize = 84;

/// Numbers that a kernel gives of a series, fewer where there are so many points to learn from.
const EACH: usize = 119;
const FEW: usize = 24;
const MANY: usize = 2_000_000;

/// Dilations, at most.
const DILATIONS: usize = 32;

/// Series that the regression learns from, at most.
const MOST: usize = 1000;

/// A series at even times: values channel after channel.
#[derive(Debug, Clone)]
pub struct Grid {
    pub width: usize,
    pub values: Vec<f32>,
}

/// What the convolutions tell of a series: a logit for each label, or a number.
#[derive(Debug, PartialEq)]
pub struct Kernels {
    channels: usize,
    /// Points of the longest series that was learned from, which say how far dilations go.
    length: usize,
    /// What outputs of kernels are compared with; a feature is the share of points at which they are larger.
    biases: Vec<f32>,
    /// Of each feature for each output, the constants last.
    weights: Vec<f32>,
    outputs: usize,
}

impl Grid {
    fn length(&self) -> usize {
        self.values.len() / self.width
    }

    fn channel(&self, channel: usize) -> &[f32] {
        &self.values[channel * self.length()..(channel + 1) * self.length()]
    }
}

/// Dilations, and how many numbers a kernel gives with each.
fn dilations(length: usize, each: usize) -> Vec<(usize, usize)> {
    let most = ((length.max(TAPS + 1) - 1) as f64 / (TAPS - 1) as f64).log2();
    let mut found: Vec<(usize, usize)> = Vec::new();
    for n in 0..each {
        let dilation = (most * (n * DILATIONS / each) as f64 / (DILATIONS - 1) as f64).exp2() as usize;
        match found.last_mut() {
            Some((last, count)) if *last == dilation => *count += 1,
            _ => found.push((dilation, 1)),
        }
    }
    found
}

/// Adds `from`, moved by so many points, to `to`; what is beyond an end counts as 0.
fn add(to: &mut [f32], from: &[f32], by: isize, factor: f32) {
    let (skip, count) = (by.unsigned_abs().min(to.len()), to.len());
    let (to, from) =
        if by < 0 { (&mut to[skip..], &from[..count - skip]) } else { (&mut to[..count - skip], &from[skip..]) };
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

/// Calls `each` with the outputs of every kernel at every dilation on a series, and the number of features that they make.
fn convolutions(one: &Grid, length: usize, features: usize, mut each: impl FnMut(&[f32], usize)) {
    let triples: Vec<[usize; 3]> =
        (0..TAPS).flat_map(|a| (a + 1..TAPS).flat_map(move |b| (b + 1..TAPS).map(move |c| [a, b, c]))).collect();
    let mut random = Random::new(7, 0);
    let count = one.length();
    let at = |tap: usize, dilation: usize| (tap as isize - (TAPS / 2) as isize) * dilation as isize;
    let all = |values: &[f32], dilation: usize| {
        let mut sum = vec![0f32; count];
        (0..TAPS).for_each(|tap| add(&mut sum, values, at(tap, dilation), -1.0));
        sum
    };
    for (n, (dilation, made)) in dilations(length, features / KERNELS).into_iter().enumerate() {
        let alone = (one.width == 1).then(|| all(&one.values, dilation));
        for (k, triple) in triples.iter().enumerate() {
            let (mut outputs, joined);
            let values = match &alone {
                Some(sum) => {
                    outputs = sum.clone();
                    &one.values
                }
                None => {
                    // Some of the channels, few more often.
                    let most = (one.width.min(TAPS) as f64 + 1.0).log2();
                    let some = ((random.next() >> 11) as f64 / (1u64 << 53) as f64 * most).exp2() as usize;
                    let mut channels: Vec<usize> = (0..one.width).collect();
                    random.shuffle(&mut channels);
                    let mut sum = vec![0f32; count];
                    channels.iter().take(some.max(1)).for_each(|channel| add(&mut sum, one.channel(*channel), 0, 1.0));
                    joined = sum;
                    outputs = all(&joined, dilation);
                    &joined
                }
            };
            triple.iter().for_each(|tap| add(&mut outputs, values, at(*tap, dilation), 3.0));
            // Every other one without the points at which a kernel reaches beyond the ends.
            let reach = TAPS / 2 * dilation;
            let inner = if (n + k) % 2 == 1 && count > 2 * reach { reach..count - reach } else { 0..count };
            each(&outputs[inner], made);
        }
    }
}

impl Kernels {
    /// Learns from series, and what is told of each by a regression that has not learned from it.
    pub fn fit(series: &[Grid], goals: &[Goal], outputs: usize) -> (Self, Vec<Vec<f32>>) {
        let length = series.iter().map(Grid::length).max().unwrap_or(1);
        let points: usize = series.iter().map(|one| one.values.len()).sum();
        let features = KERNELS * if points > MANY { FEW } else { EACH };
        let channels = series.first().map_or(1, |one| one.width);
        let mut kernels = Self { channels, length, biases: Vec::new(), weights: Vec::new(), outputs };
        // Biases are quantiles of what kernels give on series drawn at random.
        let drawn = evenly(series, 64);
        let mut found: Vec<Vec<Vec<f32>>> = drawn
            .par_iter()
            .enumerate()
            .map(|(n, one)| {
                let (mut found, mut place) = (Vec::new(), 0usize);
                convolutions(one, length, features, |outputs, made| {
                    if Random::new(3, place as u64).next() as usize % drawn.len() == n {
                        let mut sorted = outputs.to_vec();
                        sorted.sort_unstable_by(f32::total_cmp);
                        // Spread by the golden ratio.
                        let share = |n: usize| ((place + n + 1) as f64 * 0.618_033_988_749_894_9).fract();
                        found.push((0..made).map(|n| sorted[(share(n) * sorted.len() as f64) as usize]).collect());
                    } else {
                        found.push(Vec::new());
                    }
                    place += made;
                });
                found
            })
            .collect();
        let count = found.first().map_or(0, Vec::len);
        kernels.biases = (0..count)
            .flat_map(|place| found.iter_mut().flat_map(move |one| std::mem::take(&mut one[place])).collect::<Vec<_>>())
            .collect();
        let rows: Vec<Vec<f32>> = series.par_iter().map(|one| kernels.features(one)).collect();
        let learned: Vec<usize> = evenly(&(0..rows.len()).collect::<Vec<_>>(), MOST);
        let (weights, unseen) = ridge(&rows, &learned, goals, outputs);
        kernels.weights = weights;
        let mut all: Vec<Vec<f32>> = rows.iter().map(|row| kernels.told(row)).collect();
        learned.iter().zip(unseen).for_each(|(n, row)| all[*n] = row);
        (kernels, all)
    }

    /// The share of points at which each kernel's output is beyond each of its biases.
    fn features(&self, one: &Grid) -> Vec<f32> {
        let mut found = Vec::with_capacity(self.biases.len());
        convolutions(one, self.length, self.biases.len(), |outputs, made| {
            let biases = &self.biases[found.len()..found.len() + made];
            found.extend(biases.iter().map(|bias| {
                outputs.iter().map(|output| u32::from(output > bias)).sum::<u32>() as f32 / outputs.len() as f32
            }));
        });
        found
    }

    fn told(&self, features: &[f32]) -> Vec<f32> {
        let rows = self.weights.chunks(self.outputs).zip(features.iter().chain(&[1.0]));
        let mut sums = vec![0f64; self.outputs];
        rows.for_each(|(weights, x)| {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += f64::from(x * weight))
        });
        sums.into_iter().map(|sum| sum as f32).collect()
    }

    pub fn predict(&self, all: &[Grid]) -> Vec<Vec<f32>> {
        all.par_iter().map(|one| self.told(&self.features(one))).collect()
    }

    pub fn store(&self, folder: &RunFolder, file: &str) -> Result<()> {
        let sizes = bytes(&[self.channels as f32, self.length as f32]);
        let arrays = [("sizes", sizes), ("biases", bytes(&self.biases)), ("weights", bytes(&self.weights))];
        store(folder, file, &arrays.map(|(name, bytes)| (name, Dtype::F32, bytes)))
    }

    /// Reads what [`store`](Self::store) wrote, of so many channels and outputs.
    pub fn load(folder: &RunFolder, file: &str, channels: usize, outputs: usize) -> Result<Self> {
        let [sizes, biases, weights] = load(folder, file, ["sizes", "biases", "weights"])?.map(|words| numbers(&words));
        let length = sizes.get(1).copied().unwrap_or(0.0) as usize;
        let whole = sizes.first() == Some(&(channels as f32))
            && biases.len().is_multiple_of(KERNELS)
            && weights.len() == (biases.len() + 1) * outputs;
        if !whole || biases.is_empty() || length == 0 {
            return Err(folder.damaged(file, "not what a run writes"));
        }
        Ok(Self { channels, length, biases, weights, outputs })
    }
}

/// The label or number of the series to learn from that is nearest to each of `all`, by dynamic time warping within a tenth of the length
/// (Sakoe and Chiba 1978); `None` where that would take long.
pub fn nearest(learned: &[Grid], all: &[Grid]) -> Option<Vec<usize>> {
    let length = learned.iter().chain(all).map(Grid::length).max().unwrap_or(1);
    let cost = (learned.len() * all.len()) as f64 * (length * (length / 10 + 1)) as f64 * learned.first()?.width as f64;
    (cost < 4e9).then(|| {
        let one = |one: &Grid| {
            let mut best = (f32::INFINITY, 0);
            for (n, other) in learned.iter().enumerate() {
                let distance = warped(one, other, best.0);
                if distance < best.0 {
                    best = (distance, n);
                }
            }
            best.1
        };
        all.par_iter().map(one).collect()
    })
}

/// The least sum of squared distances along a path through both series; infinite where it is no less than `below`.
fn warped(a: &Grid, b: &Grid, below: f32) -> f32 {
    let (rows, columns) = (a.length(), b.length());
    let band = (rows.max(columns) / 10).max(rows.abs_diff(columns)).max(1);
    let (mut before, mut row) = (vec![f32::INFINITY; columns + 1], vec![f32::INFINITY; columns + 1]);
    before[0] = 0.0;
    for i in 0..rows {
        row.fill(f32::INFINITY);
        let mut least = f32::INFINITY;
        for j in i.saturating_sub(band)..(i + band + 1).min(columns) {
            let distance: f32 =
                (0..a.width).map(|k| (a.values[k * rows + i] - b.values[k * columns + j]).powi(2)).sum();
            let found = distance + before[j].min(before[j + 1]).min(row[j]);
            row[j + 1] = found;
            least = least.min(found);
        }
        if least >= below {
            return f32::INFINITY;
        }
        std::mem::swap(&mut before, &mut row);
    }
    before[columns]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(values: &[f32]) -> Grid {
        Grid { width: 1, values: values.to_vec() }
    }

    #[test]
    fn convolutions_are_those_of_their_definition() {
        let values: Vec<f32> = (0..40).map(|n| ((n * n) % 11) as f32 - 4.0).collect();
        let mut found = Vec::new();
        convolutions(&grid(&values), 40, KERNELS * 32, |outputs, made| found.push((outputs.to_vec(), made)));
        // Powers of two from 0 to log₂ 39/8, in 32 steps, less their fractions.
        assert_eq!(dilations(40, 32), [(1, 14), (2, 8), (3, 6), (4, 4)]);
        assert_eq!(found.len(), 4 * KERNELS);
        let at = |n: isize| usize::try_from(n).ok().and_then(|n| values.get(n)).copied().unwrap_or(0.0);
        // The first kernel weighs the first three taps; its outputs are whole, the second's without the ends.
        for (t, output) in found[0].0.iter().enumerate() {
            let expected: f32 = (0..9).map(|tap| at(t as isize + tap - 4) * if tap < 3 { 2.0 } else { -1.0 }).sum();
            assert!((output - expected).abs() < 1e-5, "{t}");
        }
        assert_eq!((found[0].0.len(), found[1].0.len(), found[3 * KERNELS].0.len()), (40, 32, 8));
        let last: f32 = (0..9).map(|tap| at(20 + 2 * (tap - 4)) * if tap > 5 { 2.0 } else { -1.0 }).sum();
        let (outputs, _) = &found[2 * KERNELS - 1];
        assert!((outputs[if outputs.len() == 40 { 20 } else { 12 }] - last).abs() < 1e-5);
    }

    #[test]
    fn shapes_are_told_at_any_place_and_read_again() {
        let mut random = Random::new(5, 5);
        let mut noise = || (random.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        let mut one = |n: usize, width: usize| {
            let mut values = Vec::new();
            for channel in 0..width {
                // A square or a triangle of the same size, somewhere in the first channel.
                let (from, label) = (5 + n * 7 % 40, n % 2);
                values.extend((0..64 + n % 3).map(|t| {
                    let inside = channel == 0 && (from..from + 16).contains(&t);
                    let shape = if label == 0 { 1.0 } else { 2.0 - (t as f32 - from as f32 - 7.5).abs() / 4.0 };
                    noise() * 0.4 + if inside { shape } else { 0.0 }
                }));
            }
            Grid { width, values }
        };
        for width in [1, 3] {
            let all: Vec<Grid> = (0..120).map(|n| one(n, width)).collect();
            let goals: Vec<Goal> = (0..120).map(|n| Goal::Label(n % 2)).collect();
            let (kernels, unseen) = Kernels::fit(&all[..80], &goals[..80], 2);
            let right = |rows: &[Vec<f32>], goals: &[Goal]| {
                rows.iter().zip(goals).filter(|(row, goal)| Goal::Label(u32::from(row[1] > row[0])) == **goal).count()
            };
            let told = kernels.predict(&all[80..]);
            assert!(
                right(&told, &goals[80..]) >= 38 && right(&unseen, &goals[..80]) >= 74,
                "{} {}",
                right(&told, &goals[80..]),
                right(&unseen, &goals[..80])
            );
            let place = tempfile::tempdir().unwrap();
            let folder = RunFolder::at(place.path(), false);
            kernels.store(&folder, "kernels").unwrap();
            assert_eq!(Kernels::load(&folder, "kernels", width, 2).unwrap(), kernels);
            assert!(Kernels::load(&folder, "kernels", width + 1, 2).is_err());
        }
    }

    #[test]
    fn the_nearest_is_warped_in_time() {
        let bump =
            |at: usize| grid(&(0..50).map(|t| if usize::abs_diff(t, at) < 4 { 1.0 } else { 0.0 }).collect::<Vec<_>>());
        let flat = grid(&(0..50).map(|t| if t < 25 { 0.1 } else { 0.2 }).collect::<Vec<_>>());
        assert_eq!(nearest(&[flat, bump(20)], &[bump(24), grid(&[0.1; 44])]), Some(vec![1, 0]));
        assert_eq!(warped(&grid(&[0.0, 1.0, 2.0]), &grid(&[0.0, 0.0, 1.0, 2.0]), 9.0), 0.0);
        assert_eq!(warped(&grid(&[0.0, 1.0, 2.0]), &grid(&[1.0, 1.0, 2.0]), 9.0), 1.0);
    }
}
