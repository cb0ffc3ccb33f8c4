//! Bits per byte of a text by a mixture of contexts of the last bytes (logistic mixing; Mahoney 2005), beside which a language model's stand.

/// Bytes of the contexts, the last of words.
const ORDERS: usize = 8;

/// Lines of a context's table at most: 128 MiB in all.
const LINES: usize = 1 << 18;

/// The chances of the four bits of half a byte after a context, by the bits before them: a line of the cache.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u32; 16]);

/// Chances that the next bit is 1 after the contexts that came before.
pub struct Contexts {
    /// Of each order the chance in 22 bits and how often it was changed in 10, at the hash of context and bits so far.
    tables: Vec<Vec<Line>>,
    /// Weights of the orders, by the bits of the byte so far and how many contexts are known.
    weights: Vec<[f32; 2 * ORDERS]>,
    /// The last bytes, the last one lowest, and the hash of the letters since a word began.
    last: u64,
    word: u64,
}

fn mixed(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^ (hash >> 32)
}

impl Contexts {
    /// For so many bytes, of which nothing was read.
    pub fn new(bytes: usize) -> Self {
        let lines = (bytes / 8).next_power_of_two().clamp(1 << 8, LINES);
        let weights = vec![[0.2; 2 * ORDERS]; 256 * (ORDERS + 1)];
        Self { tables: vec![vec![Line([1 << 31; 16]); lines]; ORDERS], weights, last: 0, word: 0 }
    }

    /// The bits that a byte costs, which is learned from.
    pub fn read(&mut self, byte: u8) -> f64 {
        let mut hashes = [0u64; ORDERS];
        for (n, hash) in hashes.iter_mut().enumerate() {
            // Of the last 1 to 6 bytes and none, and of the word so far with the byte before it.
            let context = match n {
                0 => 0,
                7 => self.word,
                n => self.last & ((1 << (8 * n)) - 1),
            };
            *hash = mixed(context.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((n as u64) << 56));
        }
        let (mut cost, mut bits, mut half, mut lines) = (0.0, 1usize, 1usize, [0usize; ORDERS]);
        for place in (0..8).rev() {
            let bit = (byte >> place) & 1;
            if place % 4 == 3 {
                lines =
                    hashes.map(|hash| mixed(hash.wrapping_add((bits as u64) << 40)) as usize % self.tables[0].len());
                half = 1;
            }
            cost += self.bit(&lines, bits, half, bit);
            (bits, half) = (bits << 1 | usize::from(bit), half << 1 | usize::from(bit));
        }
        self.last = self.last << 8 | u64::from(byte);
        let letter = byte.is_ascii_alphanumeric() || byte >= 128;
        self.word = if letter { mixed(self.word ^ u64::from(byte.to_ascii_lowercase())) } else { 0 };
        cost
    }

    fn bit(&mut self, lines: &[usize; ORDERS], bits: usize, half: usize, bit: u8) -> f64 {
        let mut inputs = [0f32; 2 * ORDERS];
        let mut known = 0;
        for n in 0..ORDERS {
            let slot = self.tables[n][lines[n]].0[half];
            let chance = ((slot >> 10) as f32 + 0.5) / (1 << 22) as f32;
            let times = slot & 1023;
            known += usize::from(times > 0);
            if times > 0 {
                inputs[2 * n] = (chance / (1.0 - chance)).ln();
                // What is sure says more than its logit.
                inputs[2 * n + 1] = (chance - 0.5) * 4.0;
            }
        }
        let weights = &mut self.weights[known * 256 + bits];
        let sum: f32 = inputs.iter().zip(weights.iter()).map(|(x, w)| x * w).sum();
        let chance = (1.0 / (1.0 + (-sum).exp())).clamp(1e-4, 1.0 - 1e-4);
        let error = f32::from(bit) - chance;
        weights.iter_mut().zip(inputs).for_each(|(w, x)| *w += 0.003 * error * x);
        for (table, line) in self.tables.iter_mut().zip(lines) {
            let slot = &mut table[*line].0[half];
            let (chance, times) = ((*slot >> 10) as i64, (*slot & 1023) as i64);
            let wanted = if bit == 1 { (1 << 22) - 1 } else { 0 };
            let chance = chance + ((wanted - chance) as f64 / (times as f64 + 1.5)) as i64;
            *slot = (chance as u32) << 10 | (times + 1).min(LIMIT) as u32;
        }
        -f64::from(if bit == 1 { chance } else { 1.0 - chance }.log2())
    }
}

/// How many changes a chance remembers.
const LIMIT: i64 = 255;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_before_costs_little_and_chance_costs_its_bits() {
        let mut contexts = Contexts::new(30_000);
        let text = "It was the best of times, it was the worst of times; ".repeat(20);
        let costs: Vec<f64> = text.bytes().map(|byte| contexts.read(byte)).collect();
        let mean = |costs: &[f64]| costs.iter().sum::<f64>() / costs.len() as f64;
        assert!(
            mean(&costs[..50]) > 3.0 && mean(&costs[1000..]) < 0.2,
            "{} {}",
            mean(&costs[..50]),
            mean(&costs[1000..])
        );
        // Four letters by chance: two bits each.
        let mut random = crate::tasks::batches::Random::new(1, 2);
        let costs: Vec<f64> = (0..20_000).map(|_| contexts.read(b"acgt"[(random.next() >> 62) as usize])).collect();
        let found = mean(&costs[10_000..]);
        assert!((1.99..2.15).contains(&found), "{found}");
    }
}
