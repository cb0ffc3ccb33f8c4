//! The cross-entropy of a vocabulary, from the rows before the last linear layer.
//!
//! With `z = h·W + b` and `p = softmax(z)` of a row whose target is `t`: `plain = −log p_t`, and with label smoothing `ε` over `V`
//! entries `smoothed = (1 − ε) plain − ε mean_v log p_v` (Szegedy et al. 2016). The gradient of `smoothed` by `z` is
//! `p − (1 − ε) 1_t − ε/V`. Logits are formed, used and forgotten a piece of rows at a time, and only for rows that count; gradients
//! are formed beside the loss, for a cotangent of 1, since both need the same logits.

use std::borrow::Cow;
use std::mem::MaybeUninit;

use super::products::{Fresh, Matrix, WeightGradient, add_rows, product, sum_parts, transposed, try_zeros, upright};
use longspan_core::error::{Error, expect};
use longspan_core::simd::rows::{load_part, store_part};
use longspan_core::simd::{dispatch, operation};
use longspan_core::threads::share;

/// Logits of a piece: 1 MiB, which a second-level cache holds.
const PIECE: usize = 1 << 18;
/// Parts of the rows that each have a sum of `dW` of their own; fewer where those would take more numbers than this.
const PARTS: usize = 8;
const SUMS: usize = 1 << 25;

/// One call.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy<'a> {
    /// `[rows, width]`.
    pub h: &'a [f32],
    /// `[width, vocabulary]`.
    pub weight: &'a [f32],
    /// `[vocabulary]`.
    pub bias: Option<&'a [f32]>,
    /// The entry that is right in each row; `None` in rows that do not count.
    pub targets: &'a [Option<u32>],
    /// Numbers of a row of `h`.
    pub width: usize,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// `ε`.
    pub smoothing: f32,
}

/// Sums over the rows that count.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loss {
    /// Without smoothing.
    pub plain: f64,
    /// With it.
    pub smoothed: f64,
}

/// The gradients of [`Loss::smoothed`].
#[derive(Debug, Clone, PartialEq)]
pub struct LossGradients {
    /// `[rows, width]`.
    pub dh: Vec<f32>,
    /// `[width, vocabulary]`.
    pub d_weight: Vec<f32>,
    /// `[vocabulary]`.
    pub d_bias: Vec<f32>,
}

struct Sink<'a> {
    dh: &'a mut [MaybeUninit<f32>],
    /// Its own sums.
    d_weight: Fresh,
    d_bias: Vec<f32>,
}

const OPERATION: &str = "cross_entropy";

impl CrossEntropy<'_> {
    fn check(&self) -> Result<(), Error> {
        let Self { width, vocabulary, smoothing, .. } = *self;
        for (name, got, [a, b]) in [
            ("h", self.h.len(), [self.targets.len(), width]),
            ("weight", self.weight.len(), [width, vocabulary]),
            ("bias", self.bias.map_or(vocabulary, <[f32]>::len), [1, vocabulary]),
        ] {
            let fits = a.checked_mul(b) == Some(got);
            expect(fits, OPERATION, name, || format!("{a} × {b} numbers"), || got.to_string())?;
        }
        let fits = (0.0..1.0).contains(&smoothing);
        expect(fits, OPERATION, "smoothing", || "a number in [0, 1)".into(), || smoothing.to_string())?;
        let beyond = self.targets.iter().flatten().find(|&&target| target as usize >= vocabulary);
        let expected = || format!("entries below {vocabulary}");
        expect(beyond.is_none(), OPERATION, "targets", expected, || beyond.copied().unwrap_or(0).to_string())
    }

    /// The loss.
    ///
    /// # Errors
    /// Lengths that do not fit, a smoothing outside [0, 1), targets beyond the vocabulary, memory that is not there.
    pub fn loss(&self) -> Result<Loss, Error> {
        self.check()?;
        self.counted()?.run(None)
    }

    /// The loss and its gradients.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    pub fn training(&self) -> Result<(Loss, LossGradients), Error> {
        self.check()?;
        let (loss, gradients) = self.counted()?.training()?;
        let (width, all) = (self.width, self.targets.len());
        if gradients.dh.len() == all * width {
            return Ok((loss, gradients));
        }
        let mut dh = try_zeros(all * width)?;
        let counted = (0..all).filter(|&row| self.targets[row].is_some());
        for (row, part) in counted.zip(gradients.dh.chunks_exact(width.max(1))) {
            dh[row * width..][..width].copy_from_slice(part);
        }
        Ok((loss, LossGradients { dh, ..gradients }))
    }

    /// The rows that count, side by side.
    fn counted(&self) -> Result<Counted<'_>, Error> {
        let targets: Vec<u32> = self.targets.iter().flatten().copied().collect();
        if targets.len() == self.targets.len() {
            return Ok(Counted { call: self, h: Cow::Borrowed(self.h), targets });
        }
        let mut h = Vec::new();
        let len = targets.len() * self.width;
        h.try_reserve_exact(len).map_err(|_| Error::Memory { bytes: len.saturating_mul(size_of::<f32>()) })?;
        for (row, _) in self.targets.iter().enumerate().filter(|(_, target)| target.is_some()) {
            h.extend_from_slice(&self.h[row * self.width..][..self.width]);
        }
        Ok(Counted { call: self, h: Cow::Owned(h), targets })
    }
}

/// The rows of a call that count.
struct Counted<'a> {
    call: &'a CrossEntropy<'a>,
    h: Cow<'a, [f32]>,
    targets: Vec<u32>,
}

impl Counted<'_> {
    /// The loss and its gradients, `dh` for these rows.
    fn training(&self) -> Result<(Loss, LossGradients), Error> {
        let &CrossEntropy { weight, width, vocabulary, .. } = self.call;
        let mut dh = Fresh::new(self.targets.len() * width)?;
        let part = self.part();
        let mut sinks = Vec::new();
        // Rows may have no numbers at all.
        let mut rooms = dh.room().chunks_mut((part * width).max(1));
        for _ in 0..self.targets.len().div_ceil(part) {
            let dh = rooms.next().unwrap_or_default();
            sinks.push(Sink { dh, d_weight: Fresh::new(weight.len())?, d_bias: vec![0.0; vocabulary] });
        }
        let turned = transposed(weight, vocabulary, [width, vocabulary])?;
        let loss = self.run(Some((&mut sinks, &turned)))?;
        // SAFETY: every part has rows, and wrote all of its numbers.
        let sums = sum_parts(sinks.into_iter().map(|sink| (unsafe { sink.d_weight.written() }, sink.d_bias)));
        let (d_weight, d_bias) = sums.unwrap_or_else(|| (vec![0.0; weight.len()], vec![0.0; vocabulary]));
        let d_weight = upright(d_weight, [width, vocabulary])?;
        // SAFETY: every part wrote all of its rows.
        Ok((loss, LossGradients { dh: unsafe { dh.written() }, d_weight, d_bias }))
    }

    /// Rows of a part: cut by sizes alone, so that sums have the same order on any number of threads.
    fn part(&self) -> usize {
        let parts = (SUMS / self.call.weight.len().max(1)).clamp(1, PARTS);
        self.targets.len().div_ceil(parts).max(64)
    }

    /// The loss, and the gradients if there is where to write them, and `Wᵀ`.
    fn run(&self, gradients: Option<(&mut [Sink<'_>], &[f32])>) -> Result<Loss, Error> {
        let part = self.part();
        let count = self.targets.len().div_ceil(part);
        let mut sinks: Vec<_> = match gradients {
            Some((sinks, turned)) => sinks.iter_mut().map(|sink| Some((sink, turned))).collect(),
            None => Vec::new(),
        };
        sinks.resize_with(count, || None);
        let mut losses = vec![Ok(Loss::default()); count];
        let tasks: Vec<_> = sinks.into_iter().zip(&mut losses).enumerate().collect();
        share(tasks.into_iter(), |(n, (sink, loss))| {
            let end = ((n + 1) * part).min(self.targets.len());
            *loss = self.rows(n * part, &self.targets[n * part..end], sink);
        });
        let mut sum = Loss::default();
        for loss in losses {
            let loss = loss?;
            sum.plain += loss.plain;
            sum.smoothed += loss.smoothed;
        }
        Ok(sum)
    }

    /// The loss of the rows from `first` on.
    fn rows(&self, first: usize, targets: &[u32], sink: Option<(&mut Sink<'_>, &[f32])>) -> Result<Loss, Error> {
        let &CrossEntropy { weight, width, vocabulary, bias, smoothing, .. } = self.call;
        let mut sum = Loss::default();
        let piece = (PIECE / vocabulary).clamp(64, 512).min(targets.len());
        let mut memory = Fresh::new(piece * vocabulary)?;
        let weight = Matrix::rows(weight, vocabulary);
        let mut sink = sink.map(|(Sink { dh, d_weight, d_bias }, turned)| {
            (dh, WeightGradient::new(d_weight.room(), [width, vocabulary]), d_bias, Matrix::rows(turned, width))
        });
        for (n, targets) in targets.chunks(piece).enumerate() {
            let rows = targets.len();
            let h = &self.h[(first + n * piece) * width..][..rows * width];
            let logits = product(
                [rows, width, vocabulary],
                Matrix::rows(h, width),
                weight,
                &mut memory.room()[..rows * vocabulary],
            );
            let gradients = sink.is_some();
            let loss = dispatch(RowLosses { logits, bias, targets, smoothing, gradients });
            sum.plain += loss.plain;
            sum.smoothed += loss.smoothed;
            if let Some((dh, d_weight, d_bias, turned)) = &mut sink {
                let dh = &mut dh[n * piece * width..][..rows * width];
                product([rows, vocabulary, width], Matrix::rows(logits, vocabulary), *turned, dh);
                d_weight.add(rows, h, logits);
                add_rows(logits, d_bias);
            }
        }
        Ok(sum)
    }
}

// The losses of rows of logits, which become their gradients if those are wanted.
operation!(RowLosses, f32, |logits: &'a mut [f32],
                            bias: Option<&'a [f32]>,
                            targets: &'a [u32],
                            smoothing: f32,
                            gradients: bool|
 -> Loss {
    let width = logits.len() / targets.len().max(1);
    assert!(width > 0 && bias.is_none_or(|bias| bias.len() == width));
    let mut sum = Loss::default();
    for (row, &target) in logits.chunks_exact_mut(width).zip(targets) {
        // SAFETY: forwarded to the caller; parts of rows are checked where they are read.
        unsafe {
            let (mut most, mut total) = (V::splat(f32::NEG_INFINITY), V::splat(0.0));
            let whole = width / V::LANES * V::LANES;
            for column in (0..width).step_by(V::LANES) {
                let mut z = load_part::<V>(row, column);
                if let Some(bias) = bias {
                    z = z.add(load_part(bias, column));
                    store_part(z, row, column);
                }
                if column < whole {
                    most = most.max(z);
                }
                total = total.add(z);
            }
            let most = row[whole..].iter().fold(most.largest(), |most, &z| most.max(z));
            let (mean, right) = (total.sum() / width as f32, row[target as usize]);
            // The target's share is kept apart: beside it a confident row's others are below its rounding.
            row[target as usize] = f32::NEG_INFINITY;
            let (mut sums, shift) = (V::splat(0.0), V::splat(most));
            for column in (0..whole).step_by(V::LANES) {
                let e = V::load(row.as_ptr().add(column)).sub(shift).exp_nonpositive();
                e.store(row.as_mut_ptr().add(column));
                sums = sums.add(e);
            }
            let mut others = sums.sum();
            for z in &mut row[whole..] {
                *z = (*z - most).exp();
                others += *z;
            }
            let share = (right - most).exp();
            row[target as usize] = share;
            let sums = others + share;
            let [most, right, mean] = [most, right, mean].map(f64::from);
            let log_sums = f64::from(sums).ln();
            let plain = if others < share { f64::from(others / share).ln_1p() } else { (most - right) + log_sums };
            sum.plain += plain;
            sum.smoothed += plain + f64::from(smoothing) * ((most - mean) + log_sums - plain);
            if gradients {
                let (scale, spread) = (V::splat(1.0 / sums), V::splat(-smoothing / width as f32));
                for column in (0..width).step_by(V::LANES) {
                    store_part(load_part::<V>(row, column).mul_add(scale, spread), row, column);
                }
                // `p − 1` and its share of the smoothing.
                row[target as usize] = smoothing - smoothing / width as f32 - others / sums;
            }
        }
    }
    sum
});
