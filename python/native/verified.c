/*
 * Reads and verifies blocks. Bytes that the kernel copies into memory are checked while they
 * are still in the caches of the core that copied them, so each byte crosses memory once.
 *
 * A block is 64 KiB and has a CRC-32C (Castagnoli). The checksum is a fold by carry-less
 * multiplication: of 512 bits at a time with AVX-512, else of 128 bits with PCLMUL or PMULL.
 * Every processor with AVX2 or the crypto extensions of ARMv8 has PCLMUL or PMULL. Other
 * processors use tables. See Gopal et al., Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ.
 *
 * Nothing here allocates, locks or uses Python, so any thread may call it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#define POLYNOMIAL 0x82f63b78u /* reflected */

enum { BLOCK = 64 << 10, WINDOW = 8 * BLOCK, AHEAD = 16 << 20 };

/* Algorithms for checksums, none slower than the previous one. */
enum { TABLES, FOLD_128, FOLD_512 };

static uint32_t tables[8][256];
static uint64_t by_64[2], by_256[2]; /* constants of folds, by the bytes of a step */
static int best;

/* power returns x^n modulo the polynomial, reflected and shifted left by one bit, because the
 * product of two reflected numbers of 64 bits has 127 bits. */
static uint64_t power(int n)
{
	uint32_t x = UINT32_C(1) << 31;
	while (n-- > 0)
		x = x >> 1 ^ (x & 1 ? POLYNOMIAL : 0);
	return (uint64_t)x << 1;
}

static uint64_t word(const uint8_t *p)
{
	uint64_t w;
	memcpy(&w, p, sizeof w); /* all supported platforms are little-endian */
	return w;
}

static uint32_t by_tables(uint32_t crc, const uint8_t *p, size_t n)
{
	for (; n >= 8; p += 8, n -= 8) {
		uint64_t w = word(p) ^ crc;
		crc = 0;
		for (int i = 0; i < 8; i++)
			crc ^= tables[7 - i][w >> 8 * i & 255];
	}
	for (; n > 0; n--)
		crc = crc >> 8 ^ tables[0][(crc ^ *p++) & 255];
	return crc;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#ifdef __clang__ // the features have other names
#define CRC "sse4.2,crc32"
#define WIDE "avx512f,evex512"
#else
#define CRC "sse4.2"
#define WIDE "avx512f"
#endif
#define TARGET_128 __attribute__((target(CRC ",pclmul")))
#define TARGET_512 __attribute__((target(WIDE ",vpclmulqdq," CRC ",pclmul")))

TARGET_128 static uint32_t words(uint32_t crc, const uint8_t *p, size_t n)
{
	for (; n >= 8; p += 8, n -= 8)
		crc = (uint32_t)_mm_crc32_u64(crc, word(p));
	for (; n > 0; n--)
		crc = _mm_crc32_u8(crc, *p++);
	return crc;
}

TARGET_128 static uint32_t by_128(uint32_t crc, const uint8_t *p, size_t n)
{
	if (n >= 128) {
		const __m128i k = _mm_loadu_si128((const __m128i *)by_64);
		__m128i a[4];
		uint8_t rest[64];
		for (int i = 0; i < 4; i++)
			a[i] = _mm_loadu_si128((const __m128i *)p + i);
		a[0] = _mm_xor_si128(a[0], _mm_cvtsi32_si128((int)crc));
		for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
			_mm_prefetch((const char *)p + 1024, _MM_HINT_T0);
			for (int i = 0; i < 4; i++)
				a[i] = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a[i], k, 0x00), _mm_clmulepi64_si128(a[i], k, 0x11)),
						     _mm_loadu_si128((const __m128i *)p + i));
		}
		for (int i = 0; i < 4; i++)
			_mm_storeu_si128((__m128i *)rest + i, a[i]);
		crc = words(0, rest, sizeof rest);
	}
	return words(crc, p, n);
}

TARGET_512 static uint32_t by_512(uint32_t crc, const uint8_t *p, size_t n)
{
	if (n >= 512) {
		const __m512i k = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)by_256));
		__m512i a[4];
		uint8_t rest[256];
		for (int i = 0; i < 4; i++)
			a[i] = _mm512_loadu_si512((const __m512i *)p + i);
		a[0] = _mm512_xor_si512(a[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
		for (p += 256, n -= 256; n >= 256; p += 256, n -= 256)
			for (int i = 0; i < 4; i++) {
				_mm_prefetch((const char *)p + 2048 + 64 * i, _MM_HINT_T0);
				a[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a[i], k, 0x00), _mm512_clmulepi64_epi128(a[i], k, 0x11),
								 _mm512_loadu_si512((const __m512i *)p + i), 0x96);
			}
		for (int i = 0; i < 4; i++)
			_mm512_storeu_si512((__m512i *)rest + i, a[i]);
		crc = words(0, rest, sizeof rest);
	}
	return words(crc, p, n);
}

// found asks the processor, and not the compiler's library, which zig's lacks for this.
static int found(void)
{
	unsigned a, b, c, d, low, high;
	if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_2) || !(c & bit_PCLMUL))
		return TABLES;
	if (!(c & bit_OSXSAVE))
		return FOLD_128;
	__asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); // what the system saves: 128, 256 and 512 bits
	if ((low & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
		return FOLD_128;
	return b & bit_AVX512F && c & bit_VPCLMULQDQ ? FOLD_512 : FOLD_128;
}

#elif defined(__aarch64__)
#include <arm_acle.h>
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#define TARGET_128 __attribute__((target("+crc+crypto")))

TARGET_128 static uint32_t words(uint32_t crc, const uint8_t *p, size_t n)
{
	for (; n >= 8; p += 8, n -= 8)
		crc = __crc32cd(crc, word(p));
	for (; n > 0; n--)
		crc = __crc32cb(crc, *p++);
	return crc;
}

TARGET_128 static uint32_t by_128(uint32_t crc, const uint8_t *p, size_t n)
{
	if (n >= 128) {
		const poly64x2_t k = vreinterpretq_p64_u64(vld1q_u64(by_64));
		uint64x2_t a[4];
		uint8_t rest[64];
		for (int i = 0; i < 4; i++)
			a[i] = vreinterpretq_u64_u8(vld1q_u8(p + 16 * i));
		a[0] = veorq_u64(a[0], vcombine_u64(vcreate_u64(crc), vcreate_u64(0)));
		for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
			__builtin_prefetch(p + 1024);
			for (int i = 0; i < 4; i++) {
				poly64x2_t of = vreinterpretq_p64_u64(a[i]);
				uint64x2_t low = vreinterpretq_u64_p128(vmull_p64(vgetq_lane_p64(of, 0), vgetq_lane_p64(k, 0)));
				uint64x2_t high = vreinterpretq_u64_p128(vmull_high_p64(of, k));
				a[i] = veorq_u64(veorq_u64(low, high), vreinterpretq_u64_u8(vld1q_u8(p + 16 * i)));
			}
		}
		for (int i = 0; i < 4; i++)
			vst1q_u8(rest + 16 * i, vreinterpretq_u8_u64(a[i]));
		crc = words(0, rest, sizeof rest);
	}
	return words(crc, p, n);
}

#define by_512 by_128

static int found(void)
{
	unsigned long has = getauxval(AT_HWCAP);
	return has & HWCAP_CRC32 && has & HWCAP_PMULL ? FOLD_128 : TABLES;
}

#else
#define by_128 by_tables
#define by_512 by_tables
static int found(void) { return TABLES; }
#endif

__attribute__((constructor)) static void prepare(void)
{
	for (int i = 0; i < 256; i++) {
		uint32_t crc = (uint32_t)i;
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
		tables[0][i] = crc;
	}
	for (int t = 1; t < 8; t++)
		for (int i = 0; i < 256; i++)
			tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
	/* Minus 32: the instruction or table that ends a fold multiplies by x^32. */
	by_64[0] = power(8 * 64 + 64 - 32), by_64[1] = power(8 * 64 - 32);
	by_256[0] = power(8 * 256 + 64 - 32), by_256[1] = power(8 * 256 - 32);
	best = found();
}

/* ckptstore_best returns the fastest algorithm on this processor. */
EXPORT int ckptstore_best(void) { return best; }

/* ckptstore_crc32c returns a checksum. way must not exceed ckptstore_best. */
EXPORT uint32_t ckptstore_crc32c(int way, const uint8_t *p, size_t n)
{
	uint32_t crc = way == FOLD_512 ? by_512(~0u, p, n) : way == FOLD_128 ? by_128(~0u, p, n) : by_tables(~0u, p, n);
	return ~crc;
}

/* fill returns ENDED for a file that ends too early, and ENDED - errno for an error. */
enum { DONE = 0, ENDED = -1 };

static int fill(int file, uint8_t *to, int64_t n, int64_t at)
{
	while (n > 0) {
		ssize_t got = pread(file, to, (size_t)n, at);
		if (got == 0)
			return ENDED;
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return ENDED - errno;
		to += got, at += got, n -= got;
	}
	return DONE;
}

/*
 * ckptstore_read copies size bytes at an offset of a file, and verifies the blocks that
 * hold them. The first block begins "before" bytes before the range, the last ends "after"
 * bytes after it, and sums has the checksum of each block.
 *
 * It returns the number of valid blocks: all of them, or those before the first invalid one.
 * A negative result means that the file cannot be read: -1 that it ends too early, -1-e an
 * errno e, which is EINVAL for an invalid range. Unless all blocks are valid, the memory is
 * undefined.
 */
EXPORT int64_t ckptstore_read(int file, int64_t offset, int64_t before, int64_t size, int64_t after, uint8_t *to, const uint32_t *sums)
{
	const int64_t start = offset - before, end = offset + size, last = end + after;
	int64_t at = start, blocks = 0, advised = start;
	uint8_t aside[BLOCK]; /* a block of which only a part is copied */

	if (size <= 0 || before < 0 || before >= BLOCK || after < 0 || after >= BLOCK || offset < before)
		return ENDED - EINVAL;

	while (at < last) {
		if (advised < last && advised < at + AHEAD / 2) {
			int64_t until = at + AHEAD < last ? at + AHEAD : last;
			(void)posix_fadvise(file, advised, until - advised, POSIX_FADV_WILLNEED);
			advised = until;
		}
		int64_t n = last - at < BLOCK ? last - at : BLOCK;
		const int whole = at >= offset && at + n <= end;
		if (whole) /* as many whole blocks as possible */
			n = end - at < WINDOW ? (after > 0 ? (end - at) / BLOCK * BLOCK : end - at) : WINDOW;
		uint8_t *into = whole ? to + (at - offset) : aside;
		int failed = fill(file, into, n, at);
		if (failed)
			return failed;
		for (int64_t done = 0; done < n; done += BLOCK) {
			int64_t length = n - done < BLOCK ? n - done : BLOCK;
			if (ckptstore_crc32c(best, into + done, (size_t)length) != sums[blocks])
				return blocks;
			blocks++;
		}
		if (!whole) {
			int64_t from = at > offset ? at : offset, to_ = at + n < end ? at + n : end;
			memcpy(to + (from - offset), aside + (from - at), (size_t)(to_ - from));
		}
		at += n;
	}
	return blocks;
}
