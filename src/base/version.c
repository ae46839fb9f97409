#include <sidepath/version.h>

#define TEXT_OF(number)                   #number
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

int32_t sp_library_version(void)
{
    return SP_VERSION;
}

const char *sp_library_version_text(void)
{
    return VERSION_TEXT(SP_VERSION_MAJOR, SP_VERSION_MINOR, SP_VERSION_PATCH);
}
