//! How features lie in blocks.

use super::Score;
use crate::simd::rows::padded;

#[derive(Debug, Clone, Copy)]
pub(super) struct FeatureLayout {
    /// Features of the map, before positions multiply them.
    pub mapped: usize,
    /// Numbers from one multiple to the next in a block: whole cache lines.
    pub stride: usize,
    /// Multiples in all.
    pub blocks: usize,
    /// Multiples that have a part in the weights; the others have one in the denominators alone.
    pub weigh: usize,
}

impl FeatureLayout {
    pub fn new<T>(mapped: usize, score: &Score) -> Self {
        let (blocks, weigh) = match score {
            Score::Fourier(fourier) => fourier.blocks(),
            _ => (1, 1),
        };
        Self { mapped, stride: padded::<T>(mapped), blocks, weigh }
    }

    pub fn width(&self) -> usize {
        self.blocks * self.stride
    }

    /// Numbers at the start of a row that make up the weights.
    pub fn depth(&self) -> usize {
        (self.weigh - 1) * self.stride + self.mapped
    }

    /// Where the features that make up the denominators start, if they are not those of the weights.
    pub fn separate(&self) -> Option<usize> {
        (self.weigh < self.blocks).then_some(self.weigh * self.stride)
    }

    /// Where the features that make up the denominators start.
    pub fn denominator(&self) -> usize {
        self.separate().unwrap_or(0)
    }

    /// Features without the gaps: of weights and of denominators.
    pub fn counts(&self) -> (usize, usize) {
        let weigh = self.weigh * self.mapped;
        (weigh, if self.weigh < self.blocks { (self.blocks - self.weigh) * self.mapped } else { weigh })
    }

    /// The place in a block row of a feature counted without the gaps.
    pub fn place(&self, feature: usize) -> usize {
        feature / self.mapped.max(1) * self.stride + feature % self.mapped.max(1)
    }
}
