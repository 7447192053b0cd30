#include "tensor/file.h"

#include <sys/mount.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "tensor/safetensors.h"
#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace tensor;

// A file system of 64 KiB, where the test may mount one.
class SmallDisk {
  public:
    SmallDisk() {
        mounted_ = ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, "size=64k") == 0;
        reason_ = std::strerror(errno);
    }
    ~SmallDisk() {
        if (mounted_) ::umount2(folder_.path().c_str(), MNT_DETACH);
    }
    bool mounted() const { return mounted_; }
    const std::string& reason() const { return reason_; }
    std::string operator/(const std::string& name) const { return folder_ / name; }
    std::string path() const { return folder_.path(); }

  private:
    TemporaryFolder folder_;
    bool mounted_;
    std::string reason_;
};

TEST(File, RoundTripOfAwkwardSizes) {
    const TemporaryFolder folder;
    for (const size_t size : {0, 1, 37, 1601, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20}) {
        std::string bytes(size, '\0');
        for (size_t i = 0; i < size; ++i) bytes[i] = char(i * 31 + i / 256);
        write_file_durably(folder / "f", bytes);
        EXPECT_EQ(read_file(folder / "f"), bytes) << size;
        OutputFile pieces(folder / "g");
        for (size_t at = 0; at < size; at += 700001)
            pieces.write(bytes_of(bytes).subspan(at, std::min<size_t>(700001, size - at)));
        pieces.finish();
        EXPECT_EQ(read_file(folder / "g"), bytes) << size;
    }
    EXPECT_FALSE(std::filesystem::exists(folder / ".f.tmp"));
}

TEST(File, UnfinishedFileIsRemovedAndOldFileStays) {
    const TemporaryFolder folder;
    { OutputFile(folder / "f").write(bytes_of("text")); }
    EXPECT_FALSE(std::filesystem::exists(folder / "f"));
    write_file_durably(folder / "f", "old");
    EXPECT_TRUE(throws(ErrorKind::environment, {"missing/", "No such file"},
                       [&] { write_file_durably(folder / "missing/f", "new"); }));
    EXPECT_EQ(read_file(folder / "f"), "old");
}

TEST(File, WriteAfterFinishIsABrokenContract) {
    const TemporaryFolder folder;
    OutputFile file(folder / "f");
    file.finish();
    EXPECT_TRUE(throws(ErrorKind::internal, {"f"}, [&] { file.write(bytes_of("x")); }));
    EXPECT_TRUE(throws(ErrorKind::internal, {"f"}, [&] { file.finish(); }));
}

TEST(File, MissingFileAndWhatIsNoFile) {
    const TemporaryFolder folder;
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"nothing", "No such file", "expected"},
                       [&] { read_file(folder / "nothing"); }));
    EXPECT_TRUE(
        throws(ErrorKind::bad_file, {"not a regular file"}, [&] { read_file(folder.path()); }));
    const std::string fifo = folder / "fifo";
    ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
    EXPECT_TRUE(throws(ErrorKind::bad_file, {"not a regular file"}, [&] { read_file(fifo); }))
        << "nobody writes into it, so that waiting would not end";
}

TEST(File, FullDiskIsAnEnvironmentErrorAndLosesNothing) {
    const SmallDisk disk;
    if (!disk.mounted()) GTEST_SKIP() << "cannot mount a tmpfs here: " << disk.reason();
    write_file_durably(disk / "kept", "old");
    const std::string large(200'000, 'x');
    EXPECT_TRUE(throws(ErrorKind::environment, {"kept", "No space left"},
                       [&] { write_file_durably(disk / "kept", large); }));
    EXPECT_EQ(read_file(disk / "kept"), "old");
    EXPECT_FALSE(std::filesystem::exists(disk / ".kept.tmp"));

    const std::vector<float> values(50'000, 1.0f);
    EXPECT_TRUE(throws(ErrorKind::environment, {"model.safetensors", "No space left"}, [&] {
        SafetensorsWriter writer(disk / "model.safetensors", {{"w", DType::f32, {50'000}}});
        writer.write("w", values);
        writer.finish();
    }));
    EXPECT_FALSE(std::filesystem::exists(disk / "model.safetensors"));
}

// The device that is always full needs no privilege.
TEST(File, FullDeviceIsAnEnvironmentError) {
    struct stat info;
    if (::stat("/dev/full", &info) != 0 || !S_ISCHR(info.st_mode))
        GTEST_SKIP() << "there is no /dev/full here";
    const TemporaryFolder folder;
    std::filesystem::create_symlink("/dev/full", folder / "full");  // the link is what is unlinked
    EXPECT_TRUE(throws(ErrorKind::environment, {"full", "No space left"}, [&] {
        OutputFile file(folder / "full");
        file.write(bytes_of("x"));
        file.finish();
    }));
}

TEST(File, HashIsFnv1a) {
    // Test vectors of the FNV reference code.
    EXPECT_EQ(hash(bytes_of("")), 0xcbf29ce484222325u);
    EXPECT_EQ(hash(bytes_of("a")), 0xaf63dc4c8601ec8cu);
    EXPECT_EQ(hash(bytes_of("foobar")), 0x85944171f73967e8u);
    EXPECT_EQ(hash(bytes_of("bar"), hash(bytes_of("foo"))), hash(bytes_of("foobar")));
}

TEST(File, QuotesKeepToOnePrintableLine) {
    EXPECT_EQ(in_quotes("a\nb\xff"), "\"a\\x0ab\\xff\"");
    EXPECT_EQ(in_quotes(std::string(100, 'x')), "\"" + std::string(80, 'x') + "...\"");
}

}  // namespace
}  // namespace fbt::tests
