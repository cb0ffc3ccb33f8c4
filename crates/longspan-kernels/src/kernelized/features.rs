//! From raw rows of queries and keys to blocks of features, and gradients back.
//!
//! A map writes its block at once. With Fourier positions the map's features go to a block of their own first and are
//! turned from there; that block stays until the gradients of the same rows have been taken back.

use super::Score;
use super::problem::{Problem, Unit};
use crate::call::{Arena, SharedRows, ViewMut};
use crate::feature_map::elementwise::Shift;
use crate::feature_map::mapping::MapBuffers;
use crate::feature_map::rows::{RawRows, RowMap, Side as MapSide};
use crate::fourier::rotation::{RotationBuffers, Rotations, Side, TokenRange};
use crate::simd::Real;
use crate::simd::block::add_scaled;

/// Working memory of one task beside the blocks of features themselves; empty for elementwise maps.
pub(super) struct Lift<'s, T> {
    rotation: Option<RotationBuffers<'s, T>>,
    /// Mapped features of the last queries and of the last keys.
    mapped: [&'s mut [T]; 2],
    /// Whether their gradients will be taken back, for which mapped features have to stay.
    taken_back: [bool; 2],
    gradient: &'s mut [T],
    /// Sums of the last keys' features, where they are turned.
    pub key_sums: &'s mut [T],
    map: MapBuffers<'s, T>,
}

/// Where the gradients of given positions go: `[kv_heads, batch, tokens, axes]` of queries and of keys.
#[derive(Clone, Copy)]
pub(super) struct PositionSink<'a, T> {
    pub queries: SharedRows<'a, T>,
    pub keys: SharedRows<'a, T>,
}

impl<'a, T> PositionSink<'a, T> {
    pub fn new(queries: &'a mut ViewMut<'_, T>, keys: &'a mut ViewMut<'_, T>) -> Self {
        Self { queries: queries.shared(), keys: keys.shared() }
    }
}

impl<'s, T: Real> Lift<'s, T> {
    /// For blocks of so many rows; `taken_back` says whether gradients of queries and of keys will be.
    pub fn new(problem: &Problem<'_, T>, rows: usize, taken_back: [bool; 2], arena: &mut Arena<'s, T>) -> Self {
        let turns = usize::from(problem.rotations.is_some());
        let (block, sums) = (turns * rows * problem.layout.stride, turns * problem.head_width);
        Self {
            rotation: problem.rotations.as_ref().map(|rotations| rotations.buffers(rows, arena)),
            mapped: [arena.take(block), arena.take(block)],
            taken_back,
            gradient: arena.take(block),
            key_sums: arena.take(sums),
            map: MapBuffers::new(&problem.mapping, rows, arena),
        }
    }

    pub fn start(&mut self, problem: &Problem<'_, T>, unit: &Unit<'_, T>) {
        if let (Some(rotations), Some(buffers)) = (&problem.rotations, &mut self.rotation) {
            rotations.start(unit.kv_head, buffers);
        }
    }
}

impl<'a, T: Real> Problem<'a, T> {
    /// Rows of a query head from row `first` of the sequence on, and where they stand.
    fn query_rows(
        &self,
        unit: &Unit<'_, T>,
        head: usize,
        first: usize,
        count: usize,
    ) -> (TokenRange<'static>, RawRows<'a, T>) {
        let range = TokenRange {
            side: Side::Query(head),
            batch: unit.sequence.batch,
            kv_head: unit.kv_head,
            token: unit.sequence.query_start + first,
            count,
            position: unit.origin + first as f64 + self.offset as f64,
            origin: unit.origin,
            ignored: None,
        };
        (range, RawRows::new(MapSide::Query(head), self.queries(unit, head).skip(first), count))
    }

    /// Keys from key `first` of the sequence on, and where they stand.
    fn key_rows<'x>(&self, unit: &'x Unit<'_, T>, first: usize, count: usize) -> (TokenRange<'x>, RawRows<'x, T>) {
        let ignored = unit.sequence.padding(first..first + count);
        let range = TokenRange {
            side: Side::Key,
            batch: unit.sequence.batch,
            kv_head: unit.kv_head,
            token: unit.sequence.key_start + first,
            count,
            position: unit.origin + first as f64,
            origin: unit.origin,
            ignored,
        };
        (range, RawRows { ignored, ..RawRows::new(MapSide::Key(unit.kv_head), unit.k.skip(first), count) })
    }

    /// Writes the features of `count` queries of one head from row `first` of the sequence on, and the exponent that was
    /// subtracted from each.
    #[allow(clippy::too_many_arguments)]
    pub fn load_queries(
        &self,
        unit: &Unit<'_, T>,
        head: usize,
        first: usize,
        count: usize,
        shifts: &mut [T],
        to: &mut [T],
        lift: &mut Lift<'_, T>,
    ) {
        let shift = self.mapping.query_shift(&mut shifts[..count]);
        self.load_rows(self.query_rows(unit, head, first, count), shift, to, lift);
    }

    /// Writes the features of `count` keys from key `first` of the sequence on; 0 for those ignored.
    pub fn load_keys(
        &self,
        unit: &Unit<'_, T>,
        first: usize,
        count: usize,
        shift: Shift<'_, T>,
        to: &mut [T],
        lift: &mut Lift<'_, T>,
    ) {
        self.load_rows(self.key_rows(unit, first, count), shift, to, lift);
    }

    fn load_rows(
        &self,
        (range, rows): (TokenRange<'_>, RawRows<'_, T>),
        shift: Shift<'_, T>,
        to: &mut [T],
        lift: &mut Lift<'_, T>,
    ) {
        let stride = self.layout.stride;
        let Lift { rotation, mapped, taken_back, key_sums, map, .. } = lift;
        if let (Some(rotations), Some(buffers)) = (&self.rotations, rotation) {
            let own = usize::from(range.side == Side::Key);
            let block = (&mut *mapped[own], taken_back[own]);
            let x = self.mapping.features(rows, shift, block, stride, map.work);
            let sums = if range.side == Side::Key { &mut **key_sums } else { &mut [] };
            sums.fill(T::ZERO);
            rotations.rotate(&range, (x, stride), (to, self.head_width), stride, sums, buffers);
        } else {
            self.mapping.write(rows, shift, to, stride, map.work);
        }
    }

    /// Takes the gradients `d` of the features of the queries that were last loaded, and that stand in `features`, back
    /// to the raw rows; `sums` takes those of the parameters of positions and of the map. Returns rows and their length.
    #[allow(clippy::too_many_arguments)]
    pub fn pull_back_queries<'x>(
        &self,
        unit: &Unit<'_, T>,
        head: usize,
        first: usize,
        count: usize,
        features: &[T],
        d: &'x mut [T],
        sums: &mut [T],
        positions: Option<PositionSink<'_, T>>,
        lift: &'x mut Lift<'_, T>,
    ) -> (&'x [T], usize) {
        let rows = self.query_rows(unit, head, first, count);
        self.pull_back(rows, features, d, sums, positions.map(|sink| sink.queries), lift)
    }

    #[allow(clippy::too_many_arguments)]
    pub fn pull_back_keys<'x>(
        &self,
        unit: &Unit<'_, T>,
        first: usize,
        count: usize,
        features: &[T],
        d: &'x mut [T],
        sums: &mut [T],
        positions: Option<PositionSink<'_, T>>,
        lift: &'x mut Lift<'_, T>,
    ) -> (&'x [T], usize) {
        let rows = self.key_rows(unit, first, count);
        self.pull_back(rows, features, d, sums, positions.map(|sink| sink.keys), lift)
    }

    fn pull_back<'x>(
        &self,
        (range, rows): (TokenRange<'_>, RawRows<'_, T>),
        features: &[T],
        d: &'x mut [T],
        sums: &mut [T],
        positions: Option<SharedRows<'_, T>>,
        lift: &'x mut Lift<'_, T>,
    ) -> (&'x [T], usize) {
        let stride = self.layout.stride;
        let (turning, sums) = sums.split_at_mut(self.turning_sums_len());
        let Lift { rotation, mapped, gradient, map, .. } = lift;
        let (features, d): (&[T], &'x mut [T]) = match (&self.rotations, rotation) {
            (Some(rotations), Some(buffers)) => {
                let mapped = &*mapped[usize::from(range.side == Side::Key)];
                let axes = self.position_axes();
                let add = |row: usize, axis: usize, x: T| {
                    if let Some(positions) = &positions {
                        // SAFETY: a token's row belongs to the (batch, key/value head) of one unit, and within it to the
                        // task that takes its gradient back; no other slice of it lives here.
                        let to = unsafe { positions.row(range.kv_head, range.batch, range.token + row, axes) };
                        to[axis] += x;
                    }
                };
                rotations.unrotate(&range, (mapped, stride), (d, self.head_width), gradient, turning, add, buffers);
                (mapped, gradient)
            }
            _ => (features, d),
        };
        self.mapping.pull_back(rows, features, d, stride, sums, map)
    }

    /// Numbers in one position, if positions are given.
    pub fn position_axes(&self) -> usize {
        match self.attention.score {
            Score::Fourier(fourier) => fourier.positions.axes(),
            _ => 0,
        }
    }

    /// Numbers in the sums that the gradients of the parameters of one head's positions are formed in.
    fn turning_sums_len(&self) -> usize {
        self.rotations.as_ref().map_or(0, |rotations| rotations.sums_len(self.layout.stride))
    }

    /// Numbers in the sums for one head's positions, and after them for its feature map.
    pub fn sums_len(&self) -> usize {
        self.turning_sums_len() + self.mapping.rows.as_ref().map_or(0, RowMap::sums_len)
    }

    /// Numbers in the gradients of given positions before they are summed over heads, of queries and of keys.
    pub fn position_lens(&self) -> [usize; 2] {
        let given = self.rotations.as_ref().is_some_and(Rotations::given);
        let rows = if given { self.dims.kv_heads * self.dims.batch * self.position_axes() } else { 0 };
        [rows * self.dims.queries, rows * self.dims.keys]
    }

    /// These gradients as `[kv_heads, batch, tokens, axes]`, all 0; none if positions are not given.
    pub fn position_views<'x>(&self, queries: &'x mut [T], keys: &'x mut [T]) -> Option<[ViewMut<'x, T>; 2]> {
        if !self.rotations.as_ref().is_some_and(Rotations::given) {
            return None;
        }
        let view = |numbers: &'x mut [T], tokens: usize| {
            numbers.fill(T::ZERO);
            let row = self.position_axes();
            ViewMut::strided(numbers, [self.dims.batch * tokens * row, tokens * row, row])
        };
        Some([view(queries, self.dims.queries), view(keys, self.dims.keys)])
    }

    /// Writes the gradients of the parameters of Fourier positions and of the map, if there are any: from the sums of each
    /// unit and the `n`-th of its heads, from those of each unit's keys, and from the gradients of positions by head. With
    /// `accumulate` they are added.
    pub fn write_feature_gradients<'x>(
        &self,
        query_sums: &dyn Fn(usize, usize) -> Vec<&'x [T]>,
        key_sums: &dyn Fn(usize) -> Vec<&'x [T]>,
        positions: [&[T]; 2],
        accumulate: bool,
        gradients: &mut [&mut [T]],
    ) {
        let group = self.dims.group();
        let units = |kv_head: usize| (0..self.sequences.len()).map(move |n| n * self.dims.kv_heads + kv_head);
        let of_query = |head: usize| -> Vec<&'x [T]> {
            units(head / group).flat_map(|index| query_sums(index, head % group)).collect()
        };
        let of_key = |kv_head: usize| -> Vec<&'x [T]> { units(kv_head).flat_map(key_sums).collect() };
        let turning = self.turning_sums_len();
        let (gradients, of_map) = gradients.split_at_mut(self.parameters.len() - self.mapping.parameters);
        if let Some(map) = &self.mapping.rows
            && let [queries, keys] = of_map
        {
            for head in 0..self.dims.heads {
                map.write_gradient(of_query(head).into_iter().map(|sums| &sums[turning..]), head, accumulate, queries);
            }
            for head in 0..self.dims.kv_heads {
                map.write_gradient(of_key(head).into_iter().map(|sums| &sums[turning..]), head, accumulate, keys);
            }
        }
        let Some(rotations) = &self.rotations else { return };
        let origin = |index: usize| self.unit(index).origin;
        let of_query = |head: usize| -> Vec<(f64, &'x [T])> {
            let of_unit = |index| query_sums(index, head % group).into_iter().map(move |sums| (origin(index), sums));
            units(head / group).flat_map(of_unit).collect()
        };
        let of_key = |kv_head: usize| -> Vec<(f64, &'x [T])> {
            units(kv_head)
                .flat_map(|index| key_sums(index).into_iter().map(move |sums| (origin(index), sums)))
                .collect()
        };
        rotations.write_gradients(self.layout.stride, of_query, of_key, self.parameters, accumulate, gradients);
        if !rotations.given() {
            return;
        }
        let last = gradients.len() - 2;
        for (to, from) in gradients[last..].iter_mut().zip(positions) {
            if !accumulate {
                to.fill(T::ZERO);
            }
            for head in from.chunks_exact(to.len().max(1)) {
                add_scaled(to, T::ONE, head);
            }
        }
    }
}
